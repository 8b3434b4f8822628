"""Gain and cost by size as a chart of characters, told apart without colour. Needs plotext, from the extra `plot`."""

from types import ModuleType

from medusa_cli.errors import MissingExtra
from medusa_cli.inspect.worth import Inspection
from medusa_cli.trees.build import Choice
from medusa_cli.util.optional import extra_hint, need

_HEIGHT, _WIDEST = 15, 78
_GAIN, _COST = "o", "x"
_FAR, _LOWEST_TOP = 2.0, 1.5


def draw(inspection: Inspection, width: int) -> str:
    """Two curves over nodes, and a line at the best size, at most `width` columns wide.

    Gain and cost must be known. Raises MissingExtra without a plotext that can draw.
    """
    assert inspection.choice is not None
    rows, best = inspection.shown, inspection.choice.size
    sizes, gains = [row.size for row in rows], [row.expected_tokens for row in rows]
    plotext = _plotext()
    figure = plotext.figure
    figure.clear()
    figure.plot_size(min(width, _WIDEST), _HEIGHT)
    if best:
        figure.line(best, orientation="vertical")
    for marker, values in ((_GAIN, gains), (_COST, [row.cost_ratio for row in rows])):
        figure.draw(figure.signal(sizes, values, marker=marker).lines())
    # a cost far above all gains is too dear, however much
    dearest = min(_FAR * max(gains), max(row.cost_ratio or 0.0 for row in rows))
    figure.ruler("y").lim(1.0, max(_LOWEST_TOP, *gains, dearest))
    every = max(1, len(rows) // 12)
    figure.ruler("x").ticks(sizes[::every], [str(size) for size in sizes[::every]])
    drawn = [line.rstrip() for line in plotext.uncolorize(figure.build().string()).splitlines()]
    return "\n".join([*_title(inspection.choice), *(line for line in drawn if line)])


def _title(choice: Choice) -> tuple[str, str]:
    """What the chart shows, and what it says."""
    nodes = "1 node" if choice.size == 1 else f"{choice.size} nodes"
    best = f"{nodes}, {choice.speedup:.2f}x" if choice.size else "none"
    return (
        f"by nodes: tokens that a step brings ({_GAIN}), its cost in plain steps ({_COST})",
        f"guessing pays where {_GAIN} lies above {_COST}; best size: {best}",
    )


def _plotext() -> ModuleType:
    """plotext from version 6 on, whose calls these are."""
    try:
        plotext = need("plotext", "plot")
    except ImportError as error:  # it is there, and its compiled part isn't
        raise MissingExtra("plotext can't be loaded", "pip install --force-reinstall plotext") from error
    if int(plotext.__version__.partition(".")[0]) < 6:
        raise MissingExtra("the curves need plotext 6", extra_hint("plot"))
    return plotext
