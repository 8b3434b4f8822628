"""The picture of how heads learnt: what is drawn, and what is said where it can't be."""

import sys
from pathlib import Path
from typing import Any

import pytest

from medusa_cli.errors import MissingExtra
from medusa_cli.plots import learning
from medusa_cli.plots.learning import draw
from medusa_cli.train.curves import Curves

TRAIN = [{"step": step, "loss": 6.0 / step} for step in range(1, 201)]
EVALS = [{"step": step, "loss": 6.5 / step, "conditional_K": [0.5, 0.3, 0.2]} for step in range(50, 201, 50)]
DECODES = [
    {"step": step, "tokens_per_step": tokens, "speedup": 1.2, "best_step": 100}
    for step, tokens in ((50, 1.3), (100, 1.7), (150, 1.6))
]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that were saved."""
    pytest.importorskip("matplotlib")
    figures: list[Any] = []
    save = learning.save
    monkeypatch.setattr(learning, "save", lambda figure, file: (figures.append(figure), save(figure, file)))
    return figures


def test_loss_guesses_and_decodes_each_have_a_panel_and_the_kept_heads_are_marked(
    tmp_path: Path, drawn: list[Any]
) -> None:
    draw(Curves(TRAIN, EVALS, DECODES), tmp_path / "training.png")
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    loss, guesses, decodes = drawn[0].axes
    assert [axes.get_title(loc="left") for axes in drawn[0].axes] == [
        "Loss", "Right where all before were right", "Held-out prompts, decoded",
    ]  # fmt: skip
    assert [line.get_label() for line in guesses.lines] == ["head 1", "head 2", "head 3"]
    assert list(decodes.lines[0].get_ydata()) == [1.3, 1.7, 1.6]
    assert [note.get_text() for note in decodes.texts] == ["plain decoding ", "kept"]
    assert list(loss.lines[-1].get_xdata()) == [50, 100, 150, 200]


def test_a_run_without_decodes_has_two_panels_and_one_of_a_single_step_is_drawn_too(
    tmp_path: Path, drawn: list[Any]
) -> None:
    draw(Curves(TRAIN, EVALS, []), tmp_path / "training.svg")
    draw(Curves(TRAIN[:1], [{"step": 1, "loss": 2.0}], []), tmp_path / "one.svg")
    assert [len(figure.axes) for figure in drawn] == [2, 2]


def test_held_out_text_without_a_label_has_no_point(tmp_path: Path, drawn: list[Any]) -> None:
    draw(Curves(TRAIN, [EVALS[0], {"step": 100}], []), tmp_path / "training.svg")
    assert list(drawn[0].axes[0].lines[-1].get_xdata()) == [50]


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra) as caught:
        draw(Curves(TRAIN, EVALS, DECODES), tmp_path / "training.png")
    assert "[plot]" in caught.value.hint
