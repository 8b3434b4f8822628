"""Answers of others, read for their hidden states: a pass that stopped goes on as it would have."""

from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_cli.config.recipe import Recipe
from medusa_cli.data.tokens import Tokens
from medusa_cli.model.target import States
from medusa_cli.pipeline import given_answers
from medusa_cli.pipeline.data_context import Stage
from medusa_cli.train.store import HiddenStore
from tests.tiny_models import prompt_of, target_of, tiny_model


class Target:
    """The tiny target, and the shape of each batch that it read."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._real = target_of(tiny_model("llama"))
        self.shapes: list[tuple[int, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def states(self, texts: list[list[int]], prompts: list[int], taps: tuple[int, ...]) -> States:
        self.shapes.append((len(texts), max(map(len, texts))))
        return self._real.states(texts, prompts, taps)


def samples_of(count: int) -> dict[str, Tokens]:
    made = {}
    for number in range(count):
        ids = prompt_of(4 + number % 7, seed=number)
        made[str(number)] = Tokens(ids, [place > 1 for place in range(len(ids))], str(number))
    return made


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(given_answers, "READ_TOKENS", 40)  # some samples a batch
    return Stage(Recipe(), Target(), tmp_path, lambda *_: None)  # type: ignore[arg-type]


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("stop", [1, 5, 6, 11])
def test_a_pass_that_stopped_in_a_batch_leaves_the_same_bytes_as_an_unbroken_one(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    samples = samples_of(12)
    given_answers.keep_states(stage, samples, tmp_path / "whole")
    whole = list(stage.target.shapes)  # type: ignore[attr-defined]
    assert len({shape[0] for shape in whole}) > 1

    real, left = HiddenStore.append, iter(range(stop))

    def dying(self: HiddenStore, sample: Any) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        real(self, sample)

    monkeypatch.setattr(HiddenStore, "append", dying)
    with pytest.raises(KeyboardInterrupt):
        given_answers.keep_states(stage, samples, tmp_path / "broken")
    monkeypatch.setattr(HiddenStore, "append", real)
    stage.target.shapes.clear()  # type: ignore[attr-defined]
    given_answers.keep_states(stage, samples, tmp_path / "broken")
    assert content(tmp_path / "broken") == content(tmp_path / "whole")
    # what was read whole is not read again
    again = stage.target.shapes  # type: ignore[attr-defined]
    assert again == whole[-len(again) :]
    assert sum(rows for rows, _ in again) - whole[-len(again)][0] < 12 - stop


def test_samples_added_later_are_read_by_themselves(stage: Stage, tmp_path: Path) -> None:
    given_answers.keep_states(stage, samples_of(8), tmp_path / "store")
    stage.target.shapes.clear()  # type: ignore[attr-defined]
    given_answers.keep_states(stage, samples_of(12), tmp_path / "store")
    assert sum(rows for rows, _ in stage.target.shapes) == 4  # type: ignore[attr-defined]
