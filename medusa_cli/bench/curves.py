"""What each size of tree gains and costs as a picture, with the size that pays best. Needs the extra `plot`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medusa_cli.bench.plotting import COLOURS, QUIET, check_plot_file, frame, new_figure, save
from medusa_cli.errors import TreeError
from medusa_cli.trees.build import Choice
from medusa_cli.trees.worth import Inspection, Worth

_GAIN, _COST, _BEST = COLOURS[0], COLOURS[6], COLOURS[4]
_FAR = 2.0  # times all gains: a dearer cost leaves the picture


def check_curves(inspection: Inspection, file: Path) -> None:
    """Raise before a model is loaded: DataError and MissingExtra as `check_plot_file`, TreeError without heads."""
    check_plot_file(file)
    if inspection.measured is None:
        raise TreeError("there is no gain to draw: no heads are at hand", "name some with --heads")


def draw(inspection: Inspection, file: Path) -> None:
    """Write the picture; the ending of `file` picks the format. Raises TreeError where no cost is known."""
    check_plot_file(file)
    if inspection.known_cost is None:
        raise TreeError("there is no cost to draw: none was measured", "add --measure: what a step costs here")
    choice, cost = inspection.choice, inspection.known_cost
    assert choice is not None
    assert cost is not None
    figure = new_figure(11, 4.8)
    left, right = figure.subplots(1, 2)
    rows = inspection.shown
    _gain_and_cost(left, inspection, rows, choice)
    _speedup(right, rows, choice)
    whose = (
        f"costs measured here on {(cost.date or '')[:10]}, runner {cost.runner}, {cost.dtype}, {cost.threads} threads"
        if cost.source == "here"
        else "costs measured where the heads were trained"
    )
    best = f"best: {_nodes(choice)}, {choice.speedup:.2f}x" if choice.size else "best: none, no tree pays"
    figure.suptitle(f"{best} · {whose}", fontsize=12)
    figure.get_layout_engine().set(h_pad=0.12, w_pad=0.12)
    save(figure, file)


def _gain_and_cost(axes: Any, inspection: Inspection, rows: Sequence[Worth], choice: Choice) -> None:
    """Tokens a step brings and what it costs, in one unit: a plain step brings one token and costs one step."""
    sizes, gains = [row.size for row in rows], [row.expected_tokens for row in rows]
    costs = [row.cost_ratio or 0.0 for row in rows]
    pays = [gain > cost for gain, cost in zip(gains, costs, strict=True)]
    if any(pays):
        shade = {"color": _GAIN, "alpha": 0.12, "linewidth": 0, "label": "guessing pays"}
        axes.fill_between(sizes, gains, costs, where=pays, interpolate=True, **shade)
    axes.plot(sizes, gains, color=_GAIN, linewidth=2, label="gain: tokens a step brings")
    axes.plot(sizes, costs, color=_COST, linewidth=2, label="cost of the step, in plain steps")
    seen = _measured(inspection, rows[-1].size)
    axes.plot(
        [size for size, _ in seen], [ratio for _, ratio in seen], "o", color=_COST, markersize=4, label="measured"
    )
    dearest = min(_FAR * max(gains), max(costs))
    top = 1.08 * max(*gains, dearest)
    axes.set_ylim(0.0, top)
    axes.set_xlim(0, rows[-1].size)
    if choice.size:
        axes.vlines(choice.size, 1.0, top, color=_BEST, linestyle="--", linewidth=1.2)
        axes.annotate("best", (choice.size, top), (4, -10), textcoords="offset points", color=_BEST, fontweight="bold")
    # both curves start at 1: below it there is room
    axes.legend(frameon=False, fontsize=9, loc="lower right", ncols=2)
    axes.xaxis.get_major_locator().set_params(integer=True)
    frame(axes, "Gain and cost", "nodes of the tree, the root left out", grid="both")
    axes.set_ylabel("tokens, or plain steps", color=QUIET)


def _speedup(axes: Any, rows: Sequence[Worth], choice: Choice) -> None:
    """Gain over cost, the line of plain decoding, and the best size by name."""
    sizes, speedups = [row.size for row in rows], [row.speedup or 0.0 for row in rows]
    axes.plot(sizes, speedups, color="#333333", linewidth=2)
    axes.axhline(1.0, color=QUIET, linewidth=1)
    axes.text(sizes[-1], 1.0, "plain decoding ", ha="right", va="bottom", color=QUIET, fontsize=9)
    words = f"{_nodes(choice)}: {choice.speedup:.2f}x" if choice.size else "none: no tree pays"
    axes.plot([choice.size], [choice.speedup], "o", color=_BEST, markersize=8, clip_on=False, zorder=3)
    side, shift = ("right", -8) if 2 * choice.size > sizes[-1] else ("left", 8)
    axes.annotate(
        words, (choice.size, choice.speedup), (shift, 10), textcoords="offset points", ha=side, color=_BEST,
        fontweight="bold",
    )  # fmt: skip
    axes.set_ylim(0.0, 1.2 * max(speedups))
    axes.set_xlim(0, sizes[-1])
    frame(axes, "Speed-up predicted: gain over cost", "nodes of the tree, the root left out", grid="both")
    axes.set_ylabel("times as fast as plain decoding", color=QUIET)


def _measured(inspection: Inspection, largest: int) -> list[tuple[int, float]]:
    """Size and cost in plain steps of each size that was measured, up to the largest drawn."""
    assert inspection.known_cost is not None
    assert inspection.cost is not None
    plain = inspection.cost.seconds(1)
    seconds = inspection.known_cost.seconds
    return [(nodes - 1, seconds[nodes] / plain) for nodes in sorted(seconds) if nodes - 1 <= largest]


def _nodes(choice: Choice) -> str:
    return "1 node" if choice.size == 1 else f"{choice.size} nodes"
