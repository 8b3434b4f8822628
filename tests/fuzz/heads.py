"""Files that go with heads: their numbers and descriptions, adapters, and trees."""

import hashlib
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from medusa_cli.assemble import DrafterChoice, adapter_for, check_choice
from medusa_cli.config.recipe import LoraSettings
from medusa_cli.errors import MedusaError
from medusa_cli.formats.native import write_heads
from medusa_cli.heads.config import MedusaConfig
from medusa_cli.heads.medusa import MedusaHeads
from medusa_cli.model.adapter import LearningAdapter, adapter_fingerprint, joined
from medusa_cli.model.loading.load import fingerprint_of
from medusa_cli.registry import read_heads
from medusa_cli.trees.files import parse_tree, read_measured, read_shape, read_tree, write_tree
from medusa_cli.trees.tree import TokenTree
from medusa_cli.util.files import write_atomically
from tests.fuzz.kind import Kind, run
from tests.fuzz.models import generate, make_folder
from tests.tiny_heads import FakeTarget, some_heads


def _heads(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_heads(some_heads(sees_root=True), folder)
    write_tree(folder / "tree.json", TokenTree.chain(3), {"expected_tokens": 1.5, "dynamic": "dynamic:4:0.1"})
    rates = [[0.4, 0.1, 0.05], [0.3, 0.1, 0.02], [0.2, 0.1, 0.01]]
    accuracy = {"plain": rates, "conditional": rates, "positions": 9, "source": "held-out"}
    write_atomically(folder / "accuracy.json", json.dumps(accuracy))
    write_atomically(folder / "provenance.json", json.dumps({"step_cost": {"1": 0.02, "4": 0.03, "8": 0.04}}))


def _seal(folder: Path, victim: str) -> None:
    """heads.json names the checksum of the numbers that are there."""
    if not victim.endswith(".safetensors"):
        return
    content = (folder / victim).read_bytes()
    described = json.loads((folder / "heads.json").read_text())
    described |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "heads.json").write_text(json.dumps(described))


def _read_heads(folder: Path, _: str) -> None:
    choice = DrafterChoice("medusa", str(folder))
    check_choice(choice, "x")
    adapter_for(choice, "x")
    read_heads(folder, FakeTarget())
    read_measured(folder)


def _inspect(folder: Path, _: str) -> list[object]:
    return ["inspect-tree", "--heads", folder, "-m", folder]


# --- adapters ---

CONFIG, NUMBERS = "heads/adapter/adapter_config.json", "heads/adapter/adapter_model.safetensors"


def _adapter(folder: Path) -> None:
    """A model, and heads that belong to it with an adapter."""
    make_folder(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    own, rows = fingerprint_of(model), model.lm_head.weight.detach().clone()
    learning = LearningAdapter(model, LoraSettings(rank=2), seed=1)
    with torch.no_grad():
        for parameter in learning.parameters.values():
            parameter.add_(0.01)
    adapter = learning.save(folder / "heads" / "adapter")
    config = MedusaConfig(
        num_heads=2, num_layers=1, hidden_size=rows.shape[1], vocab_size=rows.shape[0], draft_vocab=40,
        own_output=False, output_bias=False, target_name="model", target_fingerprint=joined(own, adapter),
        adapter=adapter,
    )  # fmt: skip
    write_heads(MedusaHeads.fresh(config, torch.arange(40), rows, None), folder / "heads")
    write_tree(folder / "heads" / "tree.json", TokenTree.chain(2), {})


def _claim(folder: Path, _: str) -> None:
    """heads.json names the adapter that is there, where it can be read at all: it would be refused as another."""
    file = folder / "heads" / "heads.json"
    described = json.loads(file.read_text())
    try:
        found = adapter_fingerprint(folder / "heads" / "adapter")
    except MedusaError:
        return
    own = described["config"]["target_fingerprint"].partition("+")[0]
    described["config"] |= {"adapter": found, "target_fingerprint": joined(own, found)}
    file.write_text(json.dumps(described))


def _with_adapter(folder: Path, _: str) -> list[object]:
    return generate(folder / "model", "--heads", folder / "heads", "--speculate", "on")


# --- trees ---

TREES = {
    "tree.json": {"paths": [[0], [0, 0], [1], [1, 0], [0, 0, 0]], "expected_tokens": 1.5, "dynamic": "dynamic:9:0.05"},
    "bare.json": [[0], [0, 0], [1]],
}
CHOICES = "first = [[0], [0, 0], [1]]\nsecond = [(0,), (1,), (0, 1)]\n"


def _trees(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, tree in TREES.items():
        (folder / name).write_text(json.dumps(tree))
    (folder / "choices.py").write_text(CHOICES)
    (folder / "spec.txt").write_text("[[0], [0, 0], [1]]")


def _read_tree(folder: Path, victim: str) -> None:
    if victim == "spec.txt":
        parse_tree((folder / victim).read_bytes().decode("utf-8", "surrogateescape"))
    elif victim == "tree.json":
        read_shape(folder)
    else:
        read_tree(Path(f"{folder / victim}:first") if victim == "choices.py" else folder / victim)


HEADS_WEIGHTS = Kind(_heads, {"heads.safetensors": "safetensors"}, _read_heads, _inspect, _seal)
HEADS = Kind(_heads, {"heads.json": "json", "accuracy.json": "json", "provenance.json": "json"}, _read_heads, _inspect)
ADAPTER = Kind(
    _adapter,
    {CONFIG: "json", NUMBERS: "safetensors"},
    lambda folder, victim: run(*_with_adapter(folder, victim)),
    _with_adapter,
    _claim,
)
TREE = Kind(
    _trees,
    {"tree.json": "json", "bare.json": "json", "choices.py": "text", "spec.txt": "text"},
    _read_tree,
    lambda folder, victim: ["inspect-tree", "--tree", folder / victim, "--heads", folder],
)
