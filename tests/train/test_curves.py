"""What the card says of a training run, from its log alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from medusa_cli.train.curves import PICTURE, Curves, as_markdown


def write_log(folder: Path, steps: int, total: int, *, decodes: int = 0, best: int | None = None) -> None:
    """A run of so many steps: an evaluation at every second one and, with `decodes`, a decode at every so many."""
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        lines.append({"kind": "train", "step": step, "total_steps": total, "loss": 9.0 / step, "top1_K": [0.1, 0.1]})
        if decodes and step % decodes == 0:
            kept = {"best_step": best, "waited": 0} if best else {}
            lines.append({"kind": "decode", "step": step, "tokens_per_step": 1 + step / 8, "speedup": 1.125, **kept})
        if step % 2 == 0:
            lines.append({"kind": "eval", "step": step, "loss": 8.0 / step, "conditional_K": [0.5, step / 100]})
    folder.mkdir(exist_ok=True)
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_card_shows_the_picture_where_there_is_one_and_else_a_small_table(tmp_path: Path) -> None:
    write_log(tmp_path, 4, 4, decodes=2)
    curves = Curves.read(tmp_path)
    drawn, listed = as_markdown(curves, drawn=True), as_markdown(curves, drawn=False)
    assert f"]({PICTURE})" in drawn
    assert "| step |" not in drawn
    assert f"]({PICTURE})" not in listed
    assert "| step | held-out loss | head 1 | head 2 | tokens a step | speed-up |" in listed
    assert "| 2 | 4.00 | 0.50 | 0.02 | 1.25 | 1.12 |" in listed
    for text in (drawn, listed):
        assert text.startswith("All 4 steps were taken.")
        assert "1.50 tokens a step, 1.12x plain decoding" in text


def test_a_long_run_is_shown_in_a_few_rows_and_the_last_is_among_them(tmp_path: Path) -> None:
    write_log(tmp_path, 500, 500)
    lines = as_markdown(Curves.read(tmp_path), drawn=False).splitlines()
    rows = [line for line in lines if line[2:3].isdigit()]
    assert len(rows) == 12
    assert rows[-1].startswith("| 500 |")
    assert rows[-1].endswith("| – | – |"), "nothing was decoded"


@pytest.mark.parametrize(
    ("steps", "best", "said"),
    [
        (8, None, "All 8 steps were taken."),
        (8, 6, "All 8 steps were taken; the heads are those of step 6, which decoded best."),
        (6, 2, "Stopped after step 6 of 8; the heads are those of step 2, which decoded best."),
    ],
)
def test_where_training_ended_and_whose_heads_were_kept_is_said(
    tmp_path: Path, steps: int, best: int | None, said: str
) -> None:
    write_log(tmp_path, steps, 8, decodes=2, best=best)
    assert Curves.read(tmp_path).account() == said


def test_the_figures_told_are_those_of_the_heads_that_are_stored(tmp_path: Path) -> None:
    write_log(tmp_path, 8, 8, decodes=2, best=4)
    assert "after step 4, with a chain of all heads: 1.50 tokens" in as_markdown(Curves.read(tmp_path), drawn=True)
    write_log(tmp_path, 8, 8, decodes=2)
    assert "after step 8, with a chain of all heads: 2.00 tokens" in as_markdown(Curves.read(tmp_path), drawn=True)


def test_a_line_cut_short_and_a_log_that_is_not_there_are_no_harm(tmp_path: Path) -> None:
    write_log(tmp_path, 4, 4)
    with (tmp_path / "train.jsonl").open("a") as log:
        log.write('{"kind": "train", "st')
    assert [row["step"] for row in Curves.read(tmp_path).train] == [1, 2, 3, 4]
    nothing = Curves.read(tmp_path / "nowhere")
    assert as_markdown(nothing, drawn=False) == ""


def test_a_log_of_an_older_run_has_no_conditional_accuracies(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(
        '{"kind": "train", "step": 1, "total_steps": 1, "loss": 2.0}\n{"kind": "eval", "step": 1, "loss": 2.5}\n'
    )
    assert "| 1 | 2.50 | – | – |" in as_markdown(Curves.read(tmp_path), drawn=False)
