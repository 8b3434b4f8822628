"""Heads with random numbers that other tools can hold, and folders as those tools leave them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from medusa_cli.formats.foreign.portable import portable
from medusa_cli.formats.foreign.writing import write
from medusa_cli.heads.medusa import MedusaHeads
from tests.tiny_heads import REAL, FakeTarget, some_heads


def whole_heads(*, num_layers: int = 1, own_output: bool = False) -> MedusaHeads:
    """Heads over all tokens that the tokenizer knows."""
    target = FakeTarget()
    like = some_heads(num_layers=num_layers).config
    config = like.model_copy(update={"own_output": own_output, "draft_vocab": REAL})
    heads = MedusaHeads.fresh(config, torch.arange(REAL), target.output_weight)
    torch.manual_seed(6)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return heads


def written(folder: Path, tool: str, heads: MedusaHeads) -> Path:
    """The folder as `medusa export` fills it, without what stands beside the heads."""
    folder.mkdir(parents=True, exist_ok=True)
    write(tool, portable(heads, FakeTarget(), tool, force=True).heads, folder)
    return folder


def published(num_heads: int, num_layers: int, hidden: int, vocab: int | None, **biases: bool) -> dict[str, Tensor]:
    """Tensors by FasterDecoding's names, as they are published; without a vocabulary those of version 2."""
    rng = torch.Generator().manual_seed(3)
    named = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            named[f"{head}.{layer}.linear.weight"] = torch.randn(hidden, hidden, generator=rng)
            if biases.get("biases", True):
                named[f"{head}.{layer}.linear.bias"] = torch.randn(hidden, generator=rng)
        if vocab:
            named[f"{head}.{num_layers}.weight"] = torch.randn(vocab, hidden, generator=rng)
    return named


def laid_out(folder: Path, tensors: Mapping[str, Tensor], file: str = "medusa_lm_head.pt", **config: Any) -> Path:
    """A folder with these tensors, and a config where it says something."""
    folder.mkdir(parents=True, exist_ok=True)
    if file.endswith(".safetensors"):
        save_file({name: value.clone().contiguous() for name, value in tensors.items()}, folder / file)
    else:
        torch.save(dict(tensors), folder / file)
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def same(found: Any, heads: Any) -> bool:
    """Whether all numbers are equal, bit for bit."""
    ours, theirs = heads.state_dict(), found.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(theirs[name], value) for name, value in ours.items())
