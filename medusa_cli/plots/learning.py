"""How heads learnt, as a picture: loss, guesses by head, and tokens a step in real decodes. Needs the extra `plot`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medusa_cli.plots.style import COLOURS, QUIET, frame, new_figure, save
from medusa_cli.train.curves import Curves, Row

_SMOOTH = 50  # of the steps, one in so many is as far as the training loss is averaged


def draw(curves: Curves, file: Path) -> None:
    """Write the picture; the ending of `file` picks the format. Raises MissingExtra, and DataError as `save`."""
    panels = [_loss, _guesses, *([_decodes] if curves.decoded else [])]
    figure = new_figure(4.6 * len(panels), 4.2)
    last = max((row["step"] for row in curves.train), default=1)
    for panel, axes in zip(panels, figure.subplots(1, len(panels)), strict=True):
        panel(axes, curves)
        axes.set_xlim(0, 1.03 * last)  # the same steps in each, however few were evaluated
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)
    save(figure, file)


def _loss(axes: Any, curves: Curves) -> None:
    """The batches' loss, thin and averaged, and the held-out one."""
    steps, losses = _points(curves.train, "loss")
    axes.plot(steps, losses, color=COLOURS[3], linewidth=0.6, alpha=0.5)
    axes.plot(steps, _averaged(losses), color=COLOURS[0], linewidth=1.8, label="batches, averaged")
    axes.plot(*_points(curves.evaluated, "loss"), "o-", color=COLOURS[6], markersize=3.5, label="held out")
    axes.legend(frameon=False, fontsize=9)
    frame(axes, "Loss", "step", grid="both")


def _guesses(axes: Any, curves: Curves) -> None:
    """Each head's share of right guesses where all before were right."""
    rows = [row for row in curves.evaluated if row.get("conditional_K")]
    for head in range(len(rows[0]["conditional_K"]) if rows else 0):
        shares = [row["conditional_K"][head] for row in rows]
        colour = COLOURS[head % len(COLOURS)]
        axes.plot([row["step"] for row in rows], shares, "o-", color=colour, markersize=3.5, label=f"head {head + 1}")
    if rows:
        axes.legend(frameon=False, fontsize=9, ncols=2)
    axes.set_ylim(0.0, 1.0)
    frame(axes, "Right where all before were right", "step", grid="both")


def _decodes(axes: Any, curves: Curves) -> None:
    """Tokens a step on held-out prompts, and the decode of the heads that are stored: where it is, what it promises."""
    steps, tokens = _points(curves.decoded, "tokens_per_step")
    axes.plot(steps, tokens, "o-", color=COLOURS[4], markersize=4)
    axes.axhline(1.0, color=QUIET, linewidth=1)
    axes.text(steps[-1], 1.0, "plain decoding ", ha="right", va="bottom", color=QUIET, fontsize=9)
    if curves.kept_step in steps:
        at = steps.index(curves.kept_step)
        axes.plot(steps[at], tokens[at], "o", color=COLOURS[6], markersize=9, fillstyle="none")
        axes.annotate("kept", (steps[at], tokens[at]), (0, 9), textcoords="offset points", ha="center", fontsize=9)
    axes.set_ylim(0.95, 1.0 + 1.25 * max(max(tokens) - 1.0, 0.1))
    frame(axes, "Held-out prompts, decoded", "step", grid="both")
    row = curves.stored
    assert row is not None
    axes.set_ylabel(f"tokens a step (stored: {row['tokens_per_step']:.2f}, {row['speedup']:.2f}x)", color=QUIET)


def _points(rows: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    """The steps that have a number of that name, and the numbers: held-out text without a label has no loss."""
    known = [row for row in rows if row.get(name) is not None]
    return [row["step"] for row in known], [row[name] for row in known]


def _averaged(values: Sequence[float]) -> list[float]:
    """Each value with those just before it."""
    width = max(1, len(values) // _SMOOTH)
    return [sum(part) / len(part) for end in range(1, len(values) + 1) if (part := values[max(0, end - width) : end])]
