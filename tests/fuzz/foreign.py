"""Heads as other tools write them: their numbers, as safetensors and as pickles, and their configs."""

import json
from collections.abc import Callable
from pathlib import Path

from medusa_cli.registry import read_heads
from tests.formats.foreign.helpers import laid_out, published, whole_heads, written
from tests.fuzz.kind import Kind
from tests.tiny_heads import HIDDEN, VOCAB, FakeTarget


def _exported(tool: str) -> Callable[[Path], object]:
    return lambda folder: written(folder, tool, whole_heads())


def _merged(prefix: str) -> Callable[[Path], object]:
    """Heads beside a model's own tensors."""

    def make(folder: Path) -> None:
        tensors = {prefix + name: value for name, value in published(3, 1, HIDDEN, VOCAB).items()}
        laid_out(
            folder,
            tensors,
            "model.safetensors",
            model_type="llama",
            medusa_num_heads=3,
            medusa={"num_medusa_layers": 1},
        )

    return make


def _read(folder: Path, _: str) -> None:
    """What `--heads` and `medusa import` read; the numbers that are read are looked at."""
    heads = read_heads(folder, FakeTarget())
    json.dumps(heads.config.model_dump(mode="json"))


def _import(folder: Path, _: str) -> list[object]:
    return ["import", folder, "-m", folder, "-o", folder / "imported"]


def _kind(make: Callable[[Path], object], file: str) -> Kind:
    form = "safetensors" if file.endswith(".safetensors") else "binary"
    return Kind(make, {file: form, "config.json": "json"}, _read, _import)


FOREIGN = {
    "fasterdecoding": _kind(_exported("fasterdecoding"), "medusa_lm_head.pt"),
    "tgi": _kind(_exported("tgi"), "medusa_lm_head.safetensors"),
    "vllm": _kind(_exported("vllm"), "model.safetensors"),
    "medusa2": _kind(_merged("medusa_head."), "model.safetensors"),
    "modelopt": _kind(_merged("medusa_heads."), "model.safetensors"),
}
