"""What each size of tree gains and costs as a picture, with the size that pays best. Needs the extra `plot`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medusa_cli.errors import TreeError
from medusa_cli.inspect.worth import Inspection, KnownCost, Worth
from medusa_cli.plots.style import COLOURS, QUIET, check_plot_file, frame, new_figure, save
from medusa_cli.trees.build import Choice
from medusa_cli.trees.contexts import ContextCost, as_bytes

_GAIN, _COST, _BEST = COLOURS[0], COLOURS[6], COLOURS[4]
_FAR = 2.0  # times all gains: a dearer cost leaves the picture


def check_curves(inspection: Inspection, file: Path, *, contexts: bool = False) -> None:
    """Raise before a model is loaded: DataError and MissingExtra as `check_plot_file`, TreeError without heads.

    contexts   costs by context will be there to draw, for which no heads are needed
    """
    check_plot_file(file)
    if inspection.measured is None and not contexts:
        raise TreeError("there is no gain to draw: no heads are at hand", "name some with --heads")


def draw(inspection: Inspection, file: Path) -> None:
    """Write the picture; the ending of `file` picks the format. Raises TreeError where no cost is known."""
    check_plot_file(file)
    cost, choice = inspection.known_cost, inspection.choice
    if cost is None:
        raise TreeError("there is no cost to draw: none was measured", "add --measure: what a step costs here")
    panels = (2 if choice else 0) + (1 if inspection.contexts else 0)
    figure = new_figure(5.5 * panels, 4.8)
    places = list(figure.subplots(1, panels, squeeze=False)[0])
    title = [_whose(cost)]
    if choice:
        _gain_and_cost(places[0], inspection, inspection.shown, choice)
        _speedup(places[1], inspection.shown, choice)
        title.insert(0, f"best: {_nodes(choice)}, {choice.speedup:.2f}x" if choice.size else "best: none, no tree pays")
    if inspection.contexts:
        _contexts(places[-1], inspection.contexts)
    figure.suptitle((" · " if panels > 1 else "\n").join(title), fontsize=12 if panels > 1 else 9)
    figure.get_layout_engine().set(h_pad=0.12, w_pad=0.12)
    save(figure, file)


def _whose(cost: KnownCost) -> str:
    """Where the costs were measured."""
    if cost.source == "heads":
        return "costs measured where the heads were trained"
    day, threads = (cost.date or "")[:10], f"{cost.threads} thread{'s' if cost.threads != 1 else ''}"
    return f"costs measured here on {day}, runner {cost.runner}, {cost.dtype}, {threads}"


def _contexts(axes: Any, costs: Sequence[ContextCost]) -> None:
    """Milliseconds of a step by the tokens before it, and the line they would follow if they grew as the bytes do."""
    places = [cost.context for cost in costs]
    for number, nodes in enumerate(sorted(costs[0].seconds)):
        times = [1000 * cost.seconds[nodes] for cost in costs]
        even = [1000 * seconds for seconds in as_bytes(costs, nodes)]
        colour, label = COLOURS[(6, 0, 4)[number % 3]], f"{nodes} node{'s' if nodes > 1 else ''}"
        axes.plot(places, even, color=colour, linestyle="--", linewidth=1.2)
        axes.plot(places, times, "o", color=colour, markersize=5, label=label)
    axes.plot([], [], color=QUIET, linestyle="--", linewidth=1.2, label="as the cache's bytes grow")
    axes.set_ylim(0.0, 1.2 * max(1000 * max(cost.seconds.values()) for cost in costs))
    axes.set_xlim(left=0)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    frame(axes, "Cost by context", "tokens before the step", grid="both")
    axes.set_ylabel("milliseconds a step", color=QUIET)


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
