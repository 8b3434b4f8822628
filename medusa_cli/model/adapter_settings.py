"""peft's adapter_config.json, typed: what of it an adapter over linear layers may say. Imports no peft.

The library takes what it finds: a word where a list belongs fails deep within, and some settings import programs.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from medusa_cli.errors import FormatError
from medusa_cli.util.plain_json import parse_json

CONFIG = "adapter_config.json"
COPY_AGAIN = "copy the folder again"
_Rank = Annotated[int, Field(ge=1, le=2**20)]
_Alpha = Annotated[float, Field(allow_inf_nan=False)]
# what changes nothing of what is added: names, versions, and numbers of ways that are off
_IDLE = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "megatron_core", "peft_version", "qalora_group_size",
    "revision", "task_type",
}  # fmt: skip


class _Settings(BaseModel):
    """Of a plain LoRA. Every other setting has to be off, as peft writes those that it doesn't use."""

    model_config = ConfigDict(extra="allow", strict=True)

    peft_type: Literal["LORA"]
    r: _Rank
    lora_alpha: _Alpha
    lora_dropout: Annotated[float, Field(ge=0, le=1)]
    target_modules: list[str] = Field(min_length=1)
    fan_in_fan_out: bool
    bias: Literal["none"]
    init_lora_weights: bool | str
    rank_pattern: dict[str, _Rank] = {}
    alpha_pattern: dict[str, _Alpha] = {}
    use_rslora: bool = False
    base_model_name_or_path: str | None = None
    revision: str | None = None
    task_type: str | None = None
    inference_mode: bool = True

    @model_validator(mode="after")
    def _others_are_off(self) -> "_Settings":
        used = [name for name, value in (self.model_extra or {}).items() if value and name not in _IDLE]
        if used:
            raise ValueError(f"it uses {used[0]}, which can't be merged here")
        return self


def read_adapter_settings(folder: Path) -> dict[str, Any]:
    """The settings as they stand there. Raises FormatError for what is missing, broken, or no plain LoRA's."""
    file = folder / CONFIG
    try:
        settings = parse_json(file.read_text(encoding="utf-8"))
        _Settings.model_validate(settings)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        told = fault["msg"].removeprefix("Value error, ")
        raise FormatError(f"{file}: {where + ': ' if where else ''}{told}", COPY_AGAIN) from error
    except (OSError, ValueError) as error:
        raise FormatError(f"the adapter in {folder} can't be read: {error}", COPY_AGAIN) from error
    return dict(settings)


def check_ranks(settings: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Raise FormatError unless the ranks are those of the numbers: peft would first make room for what is said."""
    there = {tensor.shape[0] for name, tensor in tensors.items() if "lora_A" in name and tensor.ndim}
    said = {settings["r"], *settings.get("rank_pattern", {}).values()}
    if not said <= there:
        wrong = ", ".join(map(str, sorted(said - there)))
        raise FormatError(f"{folder / CONFIG} names a rank of {wrong}, which none of its numbers has", COPY_AGAIN)
