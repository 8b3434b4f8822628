"""A tree as a picture: one layout, drawn as SVG by hand or as PNG by matplotlib. Pure, no torch.

Depth runs from left to right, one column for each head; leaves stand one under the other.
"""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from medusa_cli.inspect.render import NodeInfo, counts, gain, per_depth
from medusa_cli.util.optional import need

_LEFT, _TOP, _COLUMN, _LINE, _FOOT = 56.0, 112.0, 150.0, 30.0, 24.0
# A line runs straight between a node's two labels before it turns to the children.
_STRAIGHT = 52.0
_LEGEND = "in the disc: rank · beside it: chance to be right when its parent is, share of the gain"
_INK, _MUTED, _RULE, _PAPER = "#1c2430", "#6b7686", "#e3e7ed", "#ffffff"
_LOW, _HIGH, _ROOT = (199, 219, 240), (20, 83, 148), "#1c2430"
_FONT = "Helvetica, Arial, 'DejaVu Sans', sans-serif"


@dataclass(frozen=True)
class Spot:
    """A node in the picture: its centre, its parent's centre, and how it looks. `node` is None for the root."""

    x: float
    y: float
    from_x: float
    from_y: float
    radius: float
    node: NodeInfo | None

    @property
    def likely(self) -> float:
        """Probability from 0 to 1, or a quarter where nothing was measured."""
        return 0.25 if self.node is None or self.node.probability is None else self.node.probability

    @property
    def fill(self) -> str:
        """Colour: the darker, the likelier."""
        if self.node is None:
            return _ROOT
        mix = [round(low + (high - low) * self.likely**0.5) for low, high in zip(_LOW, _HIGH, strict=True)]
        return "#" + "".join(f"{part:02x}" for part in mix)

    @property
    def ink(self) -> str:
        """Colour of the rank on the fill."""
        return "#ffffff" if self.node is None or self.likely > 0.2 else _INK

    @property
    def stroke(self) -> float:
        """Width of the line from the parent."""
        return 1.2 + 5.0 * self.likely


@dataclass(frozen=True)
class Picture:
    """Everything either drawing needs, in pixels with y downwards."""

    width: float
    height: float
    title: str
    legend: str
    columns: list[tuple[float, str]]
    spots: list[Spot]


def lay_out(nodes: Sequence[NodeInfo]) -> Picture:
    """Place the nodes of a tree, given depth first: a leaf takes a line, a parent the middle of its children."""
    children: dict[tuple[int, ...], list[NodeInfo]] = {}
    for node in nodes:
        children.setdefault(node.path[:-1], []).append(node)
    y_of: dict[tuple[int, ...], float] = {}
    lines = 0
    for path in [*(node.path for node in reversed(nodes)), ()]:
        if path in children:
            y_of[path] = (y_of[children[path][0].path] + y_of[children[path][-1].path]) / 2
        else:
            y_of[path] = lines
            lines += 1
    # Nodes were placed from the last to the first: turn the picture over.
    y_of = {path: _TOP + (lines - 1 - y) * _LINE for path, y in y_of.items()}
    spots = [Spot(_LEFT, y_of[()], _LEFT, y_of[()], 12.0, None), *(_spot(node, y_of) for node in nodes)]
    depth = len(per_depth(nodes))
    columns = [(_LEFT, "root"), *((_LEFT + _COLUMN * d, f"head {d}") for d in range(1, depth + 1))]
    gained = gain(nodes)
    title = counts(nodes) + ("" if gained is None else f" · {1 + gained:.2f} tokens a step expected")
    legend = _LEGEND if gained else "in the disc: rank"
    width = max(_LEFT + _COLUMN * depth + 110, 40 + 9.5 * len(title), 40 + 6.0 * len(legend))
    return Picture(width, _TOP + (lines - 1) * _LINE + _LINE / 2 + _FOOT, title, legend, columns, spots)


def to_svg(nodes: Sequence[NodeInfo]) -> str:
    """The tree as an SVG document that needs nothing else."""
    picture = lay_out(nodes)
    width, height = f"{picture.width:.0f}", f"{picture.height:.0f}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="{_FONT}" role="img">',
            f"<title>{picture.title}</title>",
            f'<rect width="100%" height="100%" rx="8" fill="{_PAPER}"/>',
            _svg_text(20, 30, picture.title, size=15, fill=_INK, weight="600"),
            _svg_text(20, 50, picture.legend, size=11, fill=_MUTED),
            *_svg_columns(picture),
            *(_svg_edge(spot) for spot in _strongest_last(picture)),
            *(line for spot in picture.spots for line in _svg_spot(spot)),
            "</svg>\n",
        ]
    )


def to_png(nodes: Sequence[NodeInfo]) -> bytes:
    """The same picture as a PNG. Raises MissingExtra without matplotlib."""
    need("matplotlib", "plot")
    figure_type = need("matplotlib.figure", "plot").Figure
    circle = need("matplotlib.patches", "plot").Circle
    paths = need("matplotlib.path", "plot")
    patch = need("matplotlib.patches", "plot").PathPatch
    picture = lay_out(nodes)
    # 100 pixels of the layout are an inch, so that a font of 72 / 100 points is one of these pixels high.
    figure = figure_type(figsize=(picture.width / 100, picture.height / 100), dpi=200, facecolor=_PAPER)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, picture.width), ylim=(picture.height, 0))
    axes.set_axis_off()

    def text(x: float, y: float, words: str, size: float, colour: str, **more: str) -> None:
        axes.text(x, y, words, fontsize=size * 0.72, color=colour, zorder=4, va="baseline", **more)

    text(20, 30, picture.title, 15, _INK, weight="bold")
    text(20, 50, picture.legend, 11, _MUTED)
    for x, name in picture.columns:
        axes.plot([x, x], [_TOP - 22, picture.height - _FOOT / 2], color=_RULE, linewidth=0.72, zorder=1)
        text(x, _TOP - 30, name, 12, _MUTED, ha="center")
    for spot in _strongest_last(picture):
        curve = paths.Path(_curve(spot), [1, 2, 4, 4, 4])
        axes.add_patch(patch(curve, fill=False, edgecolor=spot.fill, linewidth=spot.stroke * 0.72, zorder=2))
    for spot in picture.spots:
        axes.add_patch(circle((spot.x, spot.y), spot.radius, facecolor=spot.fill, edgecolor="none", zorder=3))
        for x, y, words, size, colour, anchor in _labels(spot):
            text(x, y, words, size, colour, ha={"middle": "center", "start": "left"}[anchor])
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def _spot(node: NodeInfo, y_of: dict[tuple[int, ...], float]) -> Spot:
    """Where a node stands and how large it is."""
    depth = len(node.path)
    likely = 0.25 if node.probability is None else node.probability
    x = _LEFT + _COLUMN * depth
    return Spot(x, y_of[node.path], x - _COLUMN, y_of[node.path[:-1]], 8.0 + 6.0 * likely**0.5, node)


def _strongest_last(picture: Picture) -> list[Spot]:
    """The spots with a line from a parent, so ordered that the likeliest line is drawn over the others."""
    return sorted((spot for spot in picture.spots if spot.node), key=lambda spot: spot.likely)


def _curve(spot: Spot) -> list[tuple[float, float]]:
    """The line from the parent: its start, the end of the straight part, and three more points of a Bézier curve."""
    is_labelled = spot.node is not None and len(spot.node.path) > 1 and spot.node.acceptance is not None
    turn = spot.from_x + (_STRAIGHT if is_labelled else 0.0)
    middle = (spot.x + turn) / 2
    return [(spot.from_x, spot.from_y), (turn, spot.from_y), (middle, spot.from_y), (middle, spot.y), (spot.x, spot.y)]


def _labels(spot: Spot) -> Iterator[tuple[float, float, str, float, str, str]]:
    """x, baseline, words, size, colour and anchor of the words at a node."""
    if spot.node is None:
        return
    yield spot.x, spot.y + 4, str(spot.node.path[-1]), 11, spot.ink, "middle"
    if spot.node.acceptance is not None:
        yield spot.x + spot.radius + 5, spot.y - 3, f"{spot.node.acceptance:.2f}", 11, _INK, "start"
        yield spot.x + spot.radius + 5, spot.y + 10, f"{spot.node.share:.1%}", 9.5, _MUTED, "start"


def _svg_columns(picture: Picture) -> Iterator[str]:
    """A rule and a name for the root and for each head."""
    for x, name in picture.columns:
        yield f'<path d="M{x:.1f} {_TOP - 22:.1f}V{picture.height - _FOOT / 2:.1f}" stroke="{_RULE}"/>'
        yield _svg_text(x, _TOP - 30, name, size=12, fill=_MUTED, anchor="middle")


def _svg_edge(spot: Spot) -> str:
    """The line from the parent."""
    start, turn, *bezier = (f"{x:.1f} {y:.1f}" for x, y in _curve(spot))
    line = f"M{start}L{turn}C{' '.join(bezier)}"
    return f'<path d="{line}" fill="none" stroke="{spot.fill}" stroke-width="{spot.stroke:.1f}"/>'


def _svg_spot(spot: Spot) -> Iterator[str]:
    """The disc and its words."""
    yield f'<circle cx="{spot.x:.1f}" cy="{spot.y:.1f}" r="{spot.radius:.1f}" fill="{spot.fill}"/>'
    for x, y, words, size, colour, anchor in _labels(spot):
        yield _svg_text(x, y, words, size=size, fill=colour, anchor=anchor)


def _svg_text(
    x: float, y: float, words: str, *, size: float, fill: str, anchor: str = "start", weight: str = "400"
) -> str:
    """One text element; the words hold nothing that needs escaping."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{words}</text>'
    )
