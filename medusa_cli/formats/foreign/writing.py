"""Heads as other tools read them: tensors by the tool's names, and the config that it wants. Equal heads, equal bytes.

Shape letters: K heads, L layers of a head, H hidden, V rows of the target's output matrix.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from medusa_cli.errors import FormatError
from medusa_cli.heads.config import MedusaConfig
from medusa_cli.heads.medusa import MedusaHeads
from medusa_cli.util.files import sync

TOOLS = ("fasterdecoding", "trtllm", "tgi", "vllm", "medusa2")
LEGACY = "medusa_lm_head"
MERGED = "model-medusa-heads.safetensors"
NO_ROOM = "free some space, or choose another folder with -o"


def write(tool: str, heads: MedusaHeads, folder: Path) -> None:
    """Write bound heads over the whole vocabulary into a folder that is there. Raises FormatError.

    Of medusa2 only the heads' own tensors are written: the model's stand beside them (formats/foreign/merging.py).
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if tool in ("fasterdecoding", "trtllm"):
            _save_pickle(_named_like_fasterdecoding(heads, shared=False), folder / f"{LEGACY}.pt")
        elif tool == "tgi":
            _save(_named_like_fasterdecoding(heads, shared=shares_output(heads)), folder / f"{LEGACY}.safetensors")
        elif tool == "vllm":
            _save(_named_like_vllm(heads), folder / "model.safetensors")
        else:
            assert tool == "medusa2", tool
            named = _named_like_fasterdecoding(heads, shared=False)
            _save({f"medusa_head.{name}": value for name, value in named.items()}, folder / MERGED)
            return
        write_json(folder / "config.json", config_for(tool, heads))
    # torch tells a full disk as a RuntimeError
    except (OSError, SafetensorError, RuntimeError) as error:
        raise FormatError(f"can't write heads to {folder}: {' '.join(str(error).split())[:200]}", NO_ROOM) from error


def shares_output(heads: MedusaHeads) -> bool:
    """Whether TGI reads them without an output (its version 2), which takes one block a head."""
    return not heads.config.own_output and heads.config.num_layers == 1


def config_for(tool: str, heads: MedusaHeads) -> dict[str, Any]:
    """config.json as the tool's reader wants it."""
    config: MedusaConfig = heads.config
    sizes = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
    if tool == "vllm":
        return {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            **sizes,
            # every key with "num" and "heads", or "num" and "layers", is taken for these two
            "num_heads": config.num_heads,
            "num_hidden_layers": config.num_layers,
            # without it the biases are left out without a word
            "medusa_fc_bias": True,
            "original_lm_head": not config.own_output,
            "truncated_vocab_size": None,
            "logit_scale": 1.0,
            "torch_dtype": str(heads.dtype).removeprefix("torch."),
        }
    named = {
        "base_model_name_or_path": config.target_name,
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
    }
    if tool == "tgi":
        # neither architectures nor model_type: with either TGI takes the heads for another thing
        return {**named, "version": "2" if shares_output(heads) else "1"}
    # TensorRT-LLM reads the count by the second name, vLLM the sizes and the flag
    return {**named, "num_medusa_heads": config.num_heads, **sizes, "medusa_fc_bias": True, "version": "1"}


def write_json(file: Path, content: Any) -> None:
    """JSON with sorted keys."""
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    sync(file)


def _named_like_fasterdecoding(heads: MedusaHeads, *, shared: bool) -> dict[str, Tensor]:
    """Blocks, and behind them each head's output unless it is shared; what heads have in common is one tensor."""
    config: MedusaConfig = heads.config
    outputs = {} if shared else {f"{k}.{config.num_layers}.weight": _output(heads, k) for k in range(config.num_heads)}
    return {**_blocks(heads, "{head}.{layer}.linear"), **outputs}


def _named_like_vllm(heads: MedusaHeads) -> dict[str, Tensor]:
    config: MedusaConfig = heads.config
    outputs = (
        {f"lm_heads.{k}.weight": _output(heads, k) for k in range(config.num_heads)}
        if config.own_output
        else {"lm_head.weight": _output(heads, 0)}
    )
    return {**_blocks(heads, "blocks.{head}.layers.{layer}"), **outputs}


def _blocks(heads: MedusaHeads, pattern: str) -> dict[str, Tensor]:
    """Weight and bias of each head's layers, by a pattern of head and layer."""
    return {
        f"{pattern.format(head=head, layer=layer)}.{part}": values[layer, head]
        for head in range(heads.config.num_heads)
        for layer in range(heads.config.num_layers)
        for part, values in (("weight", heads.weight), ("bias", heads.bias))
    }


def _output(heads: MedusaHeads, head: int) -> Tensor:
    """A head's output [V, H]; the same tensor for all heads that share the target's."""
    if heads.output_weight is not None:
        return heads.output_weight[head]
    assert heads.shared_weight is not None
    assert len(heads.shared_weight) == heads.config.vocab_size, "widened by formats/foreign/portable.py"
    return heads.shared_weight


def _save(named: Mapping[str, Tensor], file: Path) -> None:
    """As safetensors. What heads share is written for each of them: the format has no links."""
    apart = {name: _plain(value).clone() for name, value in named.items()}
    save_file(apart, file, metadata={"format": "pt"})
    _finish(file)


def _save_pickle(named: Mapping[str, Tensor], file: Path) -> None:
    """As torch saves a state dict; what heads share is written once."""
    once: dict[tuple[int, int], Tensor] = {}
    apart: dict[str, Tensor] = {}
    for name, value in named.items():
        # a view of one head's numbers would bring the numbers of all
        key = value.data_ptr(), value.numel()
        apart[name] = once.setdefault(key, _plain(value).clone())
    torch.save(apart, file)
    _finish(file)


def _plain(value: Tensor) -> Tensor:
    return value.detach().cpu().contiguous()


def _finish(file: Path) -> None:
    """Readable as other files are, and on the disk."""
    mask = os.umask(0)
    os.umask(mask)
    file.chmod(0o666 & ~mask)
    sync(file)
