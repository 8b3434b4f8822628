"""Independent readers: each goes through a written folder by the other tool's own steps, to draft logits.

They share nothing with the writers but the folder. A tool's reader is followed where it decides: which files it opens,
which keys of the config it looks at, what it takes when a key is not there, which tensors it asks for.
Shape letters: T positions, K heads, H hidden, V rows of the output matrix.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import linear, silu

Reader = Callable[[Path, Tensor, Tensor], Tensor]
"""(folder, hidden_TH, the model's output_VH) -> logits_TKV"""
FAILURES = (OSError, SafetensorError, KeyError, ValueError, RuntimeError, IndexError, TypeError, AttributeError)
"""What a reader raises that finds something else than it wants."""


def fasterdecoding(folder: Path, hidden_TH: Tensor, output_VH: Tensor) -> Tensor:
    """A list of K sequences of L residual blocks and a linear layer, filled from medusa_lm_head.pt.

    The L blocks of a head are one module L times, into which each layer is loaded in turn: the last one's numbers stay.
    """
    config = _config(folder)
    num_heads, num_layers = config["medusa_num_heads"], config["medusa_num_layers"]
    state = torch.load(folder / "medusa_lm_head.pt", map_location="cpu", weights_only=True)
    return _old_heads(_tied(state, num_layers), num_heads, num_layers, hidden_TH, None)


def trtllm(folder: Path, hidden_TH: Tensor, output_VH: Tensor) -> Tensor:
    """As above: the count of heads by its other name, the .pt file first."""
    config = _config(folder)
    file = folder / "medusa_lm_head.pt"
    if not file.exists():
        raise ValueError("medusa_lm_head.pt is not there")
    state = torch.load(file, map_location="cpu", weights_only=True)
    if config["num_medusa_heads"] != config["medusa_num_heads"]:
        raise ValueError("the two counts of heads differ")
    return _old_heads(state, config["num_medusa_heads"], config["medusa_num_layers"], hidden_TH, None)


def tgi(folder: Path, hidden_TH: Tensor, output_VH: Tensor) -> Tensor:
    """Version 1 is tried first, which wants an output for each head; then version 2, which takes the model's."""
    config = _config(folder)
    for key in ("architectures", "model_type"):
        if key in config:
            raise ValueError(f"config.json has {key}, and TGI takes the folder for another thing")
    if not config["base_model_name_or_path"]:
        raise ValueError("no base model is named")
    num_heads, num_layers = config["medusa_num_heads"], config["medusa_num_layers"]
    state = _safetensors(folder / "medusa_lm_head.safetensors")
    if f"0.{num_layers}.weight" in state:
        return _old_heads(state, num_heads, num_layers, hidden_TH, None)
    if num_layers != 1:
        raise ValueError("version 2 takes one layer")
    return _old_heads(state, num_heads, num_layers, hidden_TH, output_VH)


def vllm(folder: Path, hidden_TH: Tensor, output_VH: Tensor) -> Tensor:
    """Keys are renamed by what they hold, defaults fill in, and every parameter must be in the files."""
    said: dict[str, Any] = {}
    for key, value in _config(folder).items():
        count = "num_heads" if "heads" in key else "num_hidden_layers" if "layers" in key else None
        said[count if "num" in key and count else key] = value
    if said["architectures"] != ["MedusaModel"] or said["model_type"] != "medusa":
        raise ValueError("the config is no Medusa model's")
    hidden, vocab = said.get("hidden_size", 4096), said.get("vocab_size", 32001)
    num_heads, num_layers = said.get("num_heads", 5), said.get("num_hidden_layers", 1)
    (file,) = sorted(folder.glob("*.safetensors"))
    state = {name.removeprefix("medusa_heads."): value for name, value in _safetensors(file).items()}
    one_output = said.get("original_lm_head", False)
    drafts = []
    for head in range(num_heads):
        inner_TH = hidden_TH
        for layer in range(num_layers):
            name = f"blocks.{head}.layers.{layer}"
            bias_H = _of_shape(state, f"{name}.bias", (hidden,)) if said.get("medusa_fc_bias", False) else None
            weight_HH = _of_shape(state, f"{name}.weight", (hidden, hidden))
            inner_TH = inner_TH + silu(linear(inner_TH, weight_HH.to(inner_TH), _like(bias_H, inner_TH)))
        name = "lm_head.weight" if one_output else f"lm_heads.{head}.weight"
        drafts.append(linear(inner_TH, _of_shape(state, name, (vocab, hidden)).to(inner_TH)))
    return torch.stack(drafts, dim=1) * said.get("logit_scale", 1.0)


def medusa2(folder: Path, hidden_TH: Tensor, output_VH: Tensor) -> Tensor:
    """A model's folder: each tensor where the index says that it is, the heads' after `medusa_head.`."""
    config = _config(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    if not any(not name.startswith("medusa_head.") for name in index):
        raise ValueError("the model's own tensors are not there")
    names: dict[str, list[str]] = {}
    for name, file in index.items():
        names.setdefault(file, []).append(name)
    state: dict[str, Tensor] = {}
    for file, wanted in names.items():
        with safe_open(folder / file, "pt") as opened:
            held = set(opened.keys())
            if lacking := set(wanted) - held:
                raise ValueError(f"{file} lacks {min(lacking)}")
            for name in wanted:
                if name.startswith("medusa_head."):
                    state[name.removeprefix("medusa_head.")] = opened.get_tensor(name)
    num_heads, num_layers = config["medusa_num_heads"], config["medusa_num_layers"]
    return _old_heads(_tied(state, num_layers), num_heads, num_layers, hidden_TH, None)


READERS: Mapping[str, Reader] = {
    "fasterdecoding": fasterdecoding,
    "trtllm": trtllm,
    "tgi": tgi,
    "vllm": vllm,
    "medusa2": medusa2,
}


def _old_heads(
    state: Mapping[str, Tensor], num_heads: int, num_layers: int, hidden_TH: Tensor, output_VH: Tensor | None
) -> Tensor:
    """Heads by the names of the first format; output_VH: the model's, for heads that have none."""
    drafts = []
    for head in range(num_heads):
        inner_TH = hidden_TH
        for layer in range(num_layers):
            weight_HH, bias_H = (state[f"{head}.{layer}.linear.{part}"].to(inner_TH) for part in ("weight", "bias"))
            inner_TH = inner_TH + silu(linear(inner_TH, weight_HH, bias_H))
        rows_VH = state[f"{head}.{num_layers}.weight"] if output_VH is None else output_VH
        drafts.append(linear(inner_TH, rows_VH.to(inner_TH)))
    return torch.stack(drafts, dim=1)


def _tied(state: Mapping[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """The state as it is once the last layer's numbers stand in all of a head's."""
    last = {}
    for name in state:
        head, _, *rest = name.split(".")
        last[name] = state[".".join([head, str(num_layers - 1), *rest])] if rest[0] == "linear" else state[name]
    return last


def _config(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return content


def _safetensors(file: Path) -> dict[str, Tensor]:
    with safe_open(file, "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def _of_shape(state: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    found = state[name]
    if tuple(found.shape) != shape:
        raise ValueError(f"{name} is {tuple(found.shape)}, and the config says {shape}")
    return found


def _like(value: Tensor | None, other: Tensor) -> Tensor | None:
    return None if value is None else value.to(other)
