"""LoRA adapters: over a model's linear layers to learn, in peft's own files, merged into the weights to decode.

The only file that knows peft. An adapted target is the model with the adapter's product added to its weights, in the
weights' own dtype, so it decodes like any other model. Its fingerprint is the model's and the adapter's, joined by +.
"""

import difflib
import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from medusa_cli.config.recipe import LoraSettings
from medusa_cli.errors import FormatError, HeadsMismatch, RecipeError, TrainingError
from medusa_cli.model.adapter_settings import CONFIG, COPY_AGAIN, check_ranks, read_adapter_settings
from medusa_cli.util.files import write_atomically

FOLDER = "adapter"  # beside the heads that belong to the adapted target
WEIGHTS = "adapter_model.safetensors"
_JOINT = "+"
# what may differ between adapters that add the same numbers
_NOT_LEARNT = {"base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping", "task_type"}


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter in peft's files, found to be the one that some heads belong to.

    fingerprint   of its numbers and of how they are added
    learnt_on     fingerprint of the model it was trained on
    owner         that model's name
    """

    folder: Path
    fingerprint: str
    learnt_on: str
    owner: str


def joined(target: str, adapter: str) -> str:
    """The fingerprint of an adapted target, from the target's own and the adapter's."""
    return f"{target}{_JOINT}{adapter}"


def stored_adapter(folder: Path, *, fingerprint: str, target_fingerprint: str, owner: str) -> StoredAdapter:
    """The adapter in `folder`, which must be the one of this fingerprint.

    target_fingerprint   of the adapted target, as `joined` makes it

    Raises FormatError when it is missing, damaged or another.
    """
    if not (folder / WEIGHTS).is_file() or not (folder / CONFIG).is_file():
        raise FormatError(
            f"the heads belong to {owner} with an adapter, and {folder} lacks {WEIGHTS} or {CONFIG}",
            "copy the whole folder, adapter/ included",
        )
    found = adapter_fingerprint(folder)
    if found != fingerprint:
        raise FormatError(
            f"{folder} is another adapter than the heads were trained with: {found}, not {fingerprint}",
            "copy the whole folder again, or go on with the run that wrote it (--resume-from-checkpoint)",
        )
    return StoredAdapter(folder, fingerprint, target_fingerprint.partition(_JOINT)[0], owner)


def adapter_fingerprint(folder: Path) -> str:
    """A short hash of an adapter's numbers and of the settings that say how they are added. Raises FormatError."""
    settings = read_adapter_settings(folder)
    try:
        with (folder / WEIGHTS).open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256")
    except OSError as error:
        raise FormatError(f"the adapter in {folder} can't be read: {error}", COPY_AGAIN) from error
    kept = {name: sorted(value) if isinstance(value, list) else value for name, value in settings.items()}
    learnt = {name: value for name, value in kept.items() if name not in _NOT_LEARNT}
    digest.update(json.dumps(learnt, sort_keys=True).encode())
    return digest.hexdigest()[:16]


def merge(model: Any, adapter: StoredAdapter, fingerprint: str) -> str:
    """Add the adapter to the model's weights, in place; returns the fingerprint of what the model is then.

    fingerprint   the model's own

    Raises HeadsMismatch for another model than the adapter's, FormatError when the files can't be merged.
    """
    if fingerprint != adapter.learnt_on:
        raise HeadsMismatch(
            f"the adapter in {adapter.folder} was trained on weights with the fingerprint {adapter.learnt_on}; "
            f"this model's are {fingerprint}",
            f"the adapter and its heads belong to {adapter.owner}: load that model",
        )
    from peft import PeftModel

    try:
        settings = read_adapter_settings(adapter.folder)
        tensors = load((adapter.folder / WEIGHTS).read_bytes())
        check_ranks(settings, tensors, adapter.folder)
        if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
            raise FormatError(f"the adapter in {adapter.folder} holds numbers that are not finite", "copy it again")
        with _without_warnings():
            PeftModel.from_pretrained(model, adapter.folder).merge_and_unload(safe_merge=True)
    # peft raises RuntimeError for shapes, ValueError and TypeError for its config
    except (RuntimeError, ValueError, TypeError, KeyError, OSError, SafetensorError) as error:
        text = " ".join(str(error).split())[:200]
        raise FormatError(
            f"the adapter in {adapter.folder} can't be merged: {text}", "copy the folder again"
        ) from error
    return joined(fingerprint, adapter.fingerprint)


class LearningAdapter:
    """An adapter over a model's linear layers that starts by adding nothing; the model's own weights stay as they are.

    Its parameters are float32 whatever the weights are. Dropout is off until `learn`. Raises RecipeError for modules
    that the model doesn't have or that can't be adapted.
    """

    def __init__(self, model: Any, settings: LoraSettings, seed: int) -> None:
        from peft import LoraConfig, get_peft_model

        layers = adaptable(model, settings.target_modules)
        config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=settings.dropout,
            target_modules=sorted(layers),
            fan_in_fan_out=all(isinstance(layer, Conv1D) for layer in layers.values()),
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=_devices_of(model)), _without_warnings():
            torch.manual_seed(Random(f"adapter of seed {seed}").getrandbits(32))  # of a number it takes 32 bits
            self._peft: Any = get_peft_model(model, config)
        self._model = model
        # get_peft_model leaves what it adds in training mode
        model.eval()
        self._checkpointed: list[Any] = []
        if settings.gradient_checkpointing:
            self._hold_one_layer_at_a_time()

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The adapter's parameters by name."""
        return {name: parameter for name, parameter in self._peft.named_parameters() if "lora_" in name}

    @property
    def num_parameters(self) -> int:
        """How many numbers learn."""
        return sum(parameter.numel() for parameter in self.parameters.values())

    @contextmanager
    def off(self) -> Iterator[None]:
        """The model predicts as it did before it was adapted."""
        self._peft.base_model.disable_adapter_layers()
        try:
            yield
        finally:
            self._peft.base_model.enable_adapter_layers()

    @contextmanager
    def learn(self) -> Iterator[None]:
        """Dropout in the adapter, and nowhere else."""
        layers = [module.lora_dropout for module in self._model.modules() if hasattr(module, "lora_dropout")]
        for layer in layers:
            layer.train()
        try:
            yield
        finally:
            for layer in layers:
                layer.eval()

    def save(self, folder: Path) -> str:
        """Write peft's two files, each whole or not at all; returns the adapter's fingerprint. Raises TrainingError."""
        from peft import get_peft_model_state_dict

        tensors = get_peft_model_state_dict(self._peft, save_embedding_layers=False)
        held = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())}
        settings = {**self._peft.peft_config["default"].to_dict(), "inference_mode": True}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / WEIGHTS, save(held, metadata={"format": "pt"}))
            text = json.dumps(settings, indent=2, sort_keys=True, default=_listed)
            write_atomically(folder / CONFIG, text + "\n")
        except OSError as error:
            raise TrainingError(
                f"can't write the adapter to {folder}: {error}",
                "free some space, then go on with --resume-from-checkpoint",
            ) from error
        return adapter_fingerprint(folder)

    def remove(self) -> None:
        """Give the model its own layers back, with every number as it was."""
        for layer in self._checkpointed:
            del layer.forward
        self._checkpointed.clear()
        self._peft.unload()
        self._model.requires_grad_(False)

    def _hold_one_layer_at_a_time(self) -> None:
        """The library's own switch needs the training mode, in which the layers' own dropout would be on."""
        for layer in self._model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
                self._checkpointed.append(layer)


def adaptable(model: Any, wanted: Iterable[str] | None) -> dict[str, nn.Module]:
    """The layers to adapt by full name: those whose name is, or ends in, one of `wanted`; None: all that can be.

    That is every linear layer but the output matrix, which the heads read as it is. Raises RecipeError naming each
    wanted name that fits none.
    """
    output = model.get_output_embeddings()
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not output and _is_plain(module.weight)
    }
    if not layers:
        raise RecipeError("lora: no layer of this model can be adapted", "leave the section lora out")
    if wanted is None:
        return layers
    faults = [fault for name in wanted if (fault := _fault(name, model, layers))]
    if faults:
        raise RecipeError("lora.target_modules: " + "; ".join(faults), f"layers are {', '.join(_short(layers))}")
    return {name: module for name, module in layers.items() if any(_named(name, want) for want in wanted)}


def count_parameters(layers: Mapping[str, nn.Module], rank: int) -> int:
    """How many numbers an adapter of this rank has over these layers."""
    weights: list[Any] = [layer.weight for layer in layers.values()]
    return sum(rank * sum(weight_OI.shape) for weight_OI in weights)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Of the libraries to each other: names that one of them is about to drop are nothing a user can change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _is_plain(weight: Tensor) -> bool:
    """Whether this is a weight that can be added to: quantised ones are whole numbers in a class of their own."""
    return type(weight) is nn.Parameter and weight.is_floating_point()


def _named(name: str, wanted: str) -> bool:
    """As peft matches names."""
    return name == wanted or name.endswith(f".{wanted}")


def _short(layers: Iterable[str]) -> list[str]:
    """The last parts of these names, each once."""
    return sorted({name.rpartition(".")[2] for name in layers})


def _fault(wanted: str, model: Any, layers: Mapping[str, nn.Module]) -> str | None:
    """What is wrong with one name, or None."""
    if any(_named(name, wanted) for name in layers):
        return None
    if any(_named(name, wanted) for name, _ in model.named_modules() if name):
        module = next(module for name, module in model.named_modules() if _named(name, wanted))
        if module is model.get_output_embeddings():
            return f"{wanted} is the output matrix, which the heads read as it is"
        return f"{wanted} is no plain linear layer"
    near = difflib.get_close_matches(wanted, [*_short(layers), *layers], n=1)
    return f"this model has no {wanted}" + (f": did you mean {near[0]}?" if near else "")


def _devices_of(model: Any) -> list[torch.device]:
    """The GPU whose generator the adapter's first numbers may come from."""
    device = next(model.parameters()).device
    return [device] if device.type == "cuda" else []


def _listed(value: Any) -> Any:
    """Sets in a fixed order, and what JSON can't hold as text."""
    return sorted(value) if isinstance(value, set | frozenset) else str(value)
