"""What a model's generation_config.json asks for: followed, overruled by flags, or named as left out."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.harness import Done, Medusa

PROMPT = "Write a story about the sea."


@pytest.fixture
def ask(medusa: Medusa, tiny: Path, tmp_path: Path) -> Callable[..., Done]:
    """A generate of the tiny model with these settings of its own."""
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    file = folder / "generation_config.json"
    before = json.loads(file.read_text())

    def run(settings: dict[str, Any], *args: object, command: str = "generate") -> Done:
        file.write_text(json.dumps({**before, **settings}))
        more = (PROMPT, "-n", 12) if command == "generate" else ("--num-prompts", 1, "-n", 4, "--drafter", "ngram")
        return medusa(command, *more, "-m", folder, "--dtype", "float32", *args)

    return run


def test_a_stop_string_of_the_model_s_own_ends_the_text(ask: Callable[..., Done]) -> None:
    whole = ask({}, "--json").document
    piece = whole["text"][2:5]
    done = ask({"stop_strings": [piece, "never"]}, "--json")
    assert done.document["finish_reason"] == "stop"
    assert done.document["text"] == whole["text"][: whole["text"].index(piece)]
    assert f"texts end before {piece!r} or 'never'" in done.err


def test_ways_of_writing_that_are_not_done_here_are_named(ask: Callable[..., Done]) -> None:
    done = ask({"num_beams": 4, "max_time": 60.0}, "-q")
    assert done.code == 0
    assert "warning: the model's generation_config asks for num_beams 4, max_time 60.0: not done here" in done.err


def test_a_bench_names_what_every_arm_leaves_out(ask: Callable[..., Done]) -> None:
    done = ask({"dola_layers": "high", "stop_strings": ["."]}, "--json", "--allow-random-prompts", command="bench")
    assert done.code == 0
    assert "stop_strings=['.'], dola_layers=high; every arm runs without" in done.document["verdict"]


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({}, ("--acceptance", "typical", "--top-k", 0)),
        ({"min_p": 0.1}, ("--top-k", 0)),
        ({"min_p": 0.1, "top_k": 5}, ("--top-k", 0, "--top-p", 1)),
        ({"top_k": 5}, ("--acceptance", "typical", "--top-k", 0, "--top-p", 1)),
    ],
)
def test_top_k_0_keeps_all_tokens_whatever_else_is_asked(
    ask: Callable[..., Done], settings: dict[str, Any], flags: tuple[object, ...]
) -> None:
    done = ask(settings, "--temperature", 0.8, *flags)
    assert done.code == 0, done.err
    assert " top_k " not in done.err
