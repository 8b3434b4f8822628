"""Where the weights go and how they are held: on one device or spread over several GPUs, in full, in 4 bits or in 8."""

from typing import Any

import torch
from transformers import BitsAndBytesConfig, TorchAoConfig

from medusa_cli.config.recipe import TargetSettings
from medusa_cli.errors import TargetError
from medusa_cli.model.loading.sources import Source
from medusa_cli.util.optional import need


def placing_of(
    settings: TargetSettings, source: Source, dtype: torch.dtype, device: torch.device
) -> dict[str, Any] | None:
    """What the library's loader is told; None where there is nothing to tell: full weights on one device.

    Raises TargetError for a file that is quantised already, and MissingExtra when what quantises is not installed.
    """
    told: dict[str, Any] = {}
    if settings.quantize != "none":
        if source.gguf_file:
            raise TargetError(
                f"{settings.model} is a .gguf file, which can't be quantised again",
                "leave out target.quantize, or name the model's own folder",
            )
        told["quantization_config"] = _in_4_bits(dtype) if settings.quantize == "4bit" else _in_8_bits()
        told["device_map"] = {"": device}
    if settings.device_map == "auto":
        told["device_map"] = "auto"
    return told or None


def _in_4_bits(dtype: torch.dtype) -> BitsAndBytesConfig:
    """NF4 with plain block scales: one row and many are multiplied by the same weights, so trees stay exact."""
    _quantiser("bitsandbytes")
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def _in_8_bits() -> TorchAoConfig:
    """Weights alone, with a scale for each output. LLM.int8 is no choice: it multiplies by the rows beside."""
    return TorchAoConfig(_quantiser("torchao.quantization", "Int8WeightOnlyConfig")())


def _quantiser(module: str, name: str | None = None) -> Any:
    """The package that quantises, or what it calls `name`. TargetError when it is there and can't be used."""
    package = module.partition(".")[0]
    try:
        found = need(module, "quantize")
        return found if name is None else getattr(found, name)
    # libraries of another torch or another machine
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        raise TargetError(
            f"{package} is installed and can't be used: {' '.join(str(error).split())[:200]}",
            f"pip install --force-reinstall {package}, in a version for this torch; or leave out target.quantize",
        ) from error


def refuse_offload(model: Any, name: str) -> None:
    """Raise TargetError when some layers found no room on the GPUs: each step would fetch them from elsewhere."""
    places = set(getattr(model, "hf_device_map", {}).values())
    elsewhere = places & {"cpu", "disk"}
    if elsewhere and len(places) > 1 or "disk" in places:
        raise TargetError(
            f"{name} does not fit on the GPUs there are: some of its layers would lie on the "
            f"{' and the '.join(sorted(elsewhere)).replace('cpu', 'CPU')}",
            "use more GPUs, a smaller model, or target.quantize=4bit",
        )
