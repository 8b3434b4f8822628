"""Law 1 for whatever the registry names: each drafter of the table, in each of its shapes, writes the greedy text.

A drafter joins by being in the table; those that other packages bring pass it in tests/examples.
"""

import functools
from pathlib import Path

import pytest
import torch

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.assemble import DrafterChoice, load_drafter
from medusa_cli.config import parts
from medusa_cli.config.parts import ANY, DRAFTERS, drafter_part, guessing_names
from medusa_cli.config.recipe import HeadsSettings, Recipe
from medusa_cli.decode.loop import Parts, collect
from medusa_cli.decode.rows import Limits
from medusa_cli.drafters.source import Wishes
from medusa_cli.formats.native import write_heads
from medusa_cli.model.target import Target
from medusa_cli.pipeline.run import fresh_heads
from tests.tiny_folders import save_gguf, save_tiny, tiny_tokenizer
from tests.tiny_models import NUM_NEW, known, target_of, tiny_model

HEADS = [name for name, part in DRAFTERS.items() if part.heads in parts.HEADS]
GATHERING = [name for name, part in DRAFTERS.items() if part.gathers]
CASES = [(name, shape) for name in HEADS for shape in ("3x2x1", "dynamic:6", "dynamic:9:0.05")]
CASES += [(name, None) for name in (*GATHERING, "mixed:medusa,suffix", "mixed:ngram,model,suffix")]


@functools.cache
def target() -> Target:
    return target_of(tiny_model("llama"), runner="packed", tokenizer=tiny_tokenizer())


def heads_in(folder: Path, kind: str) -> Path:
    """Heads of this kind with random numbers over every third token."""
    asked = Recipe(heads=HeadsSettings(type=kind, num_heads=3))
    heads = fresh_heads(asked, target(), torch.arange(0, target().real_vocab, 3))
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.3)
    write_heads(heads, folder)
    return folder


def draft_model_in(folder: Path, name: str) -> str:
    """A model of random numbers over the same words, as the drafter of that name runs it."""
    if name != "llama-cpp":
        return str(save_tiny(folder / "draft"))
    pytest.importorskip("xllamacpp")
    return str(save_gguf(folder / "draft.gguf"))


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_a_drafter_of_the_registry_gives_the_greedy_text(name: str, shape: str | None, tmp_path: Path) -> None:
    kind = drafter_part(name).heads
    folder = kind and str(heads_in(tmp_path, next(iter(parts.HEADS)) if kind == ANY else kind))
    wishes = Wishes(draft_model_in(tmp_path, name) if drafter_part(name).draft_model else None)
    drafter = load_drafter(DrafterChoice(name, folder, shape, speculate="on", wishes=wishes), target())
    assert (drafter.name, drafter.size > 0) == (name, True)
    texts = known("llama")
    for _ in range(2):  # what is remembered of a run changes no other
        parts_ = Parts(target(), drafter, Greedy())
        found = collect(parts_, texts.prompts, Limits(NUM_NEW), max_rows=2)
        assert [each.token_ids for each in found] == texts.wanted(3)


def test_every_drafter_that_guesses_is_here() -> None:
    assert {name for name, _ in CASES} >= set(guessing_names())
