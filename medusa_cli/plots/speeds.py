"""A bench's report as a picture: speed, categories, tokens a step. Needs the extra `plot`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medusa_cli.bench.document import ArmFigures, Report
from medusa_cli.plots.style import COLOURS, QUIET, check_plot_file, frame, new_figure, save


def draw(report: Report, file: Path) -> None:
    """Write the picture; the ending of `file` picks the format. The first arm of the report is the subject."""
    check_plot_file(file)
    names = report.ran
    categories = list(report.arms[names[0]].categories)
    several = len(categories) > 1
    figure = new_figure(11, 8.8 if several else 4.8)
    grid = figure.add_gridspec(2 if several else 1, 2)
    _speed(figure.add_subplot(grid[0, 0]), report, names)
    _steps(figure.add_subplot(grid[0, 1]), report.arms[names[0]], names[0])
    if several:
        _categories(figure.add_subplot(grid[1, :]), report, names, categories)
    what = f"{Path(report.model).name} · {report.dtype} · {report.device} · runner {report.runner}"
    figure.suptitle(f"{what} · {report.threads} threads", fontsize=13)
    figure.get_layout_engine().set(h_pad=0.12, w_pad=0.1)
    save(figure, file)


def _speed(axes: Any, report: Report, names: Sequence[str]) -> None:
    """Tokens a second of each arm, with the speed-up of the subject over it."""
    values = [report.arms[name].output_throughput or 0.0 for name in names]
    places = range(len(names))
    axes.barh(places, values, color=[_colour(place) for place in places], height=0.62)
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    for place, (name, value) in enumerate(zip(names, values, strict=True)):
        ratio, spread = report.speedup.get(name), report.speedup_spread.get(name)
        said = f" {value:.1f}"
        if ratio and spread:
            said += f"\n {names[0]}: {ratio:.2f}x as fast ({spread[0]:.2f}–{spread[1]:.2f})"
        axes.text(value, place, said, va="center", ha="left", fontsize=9)
    axes.set_xlim(0, max(values, default=0.0) * 1.6 or 1.0)
    frame(axes, "Speed", "tokens a second")


def _steps(axes: Any, arm: ArmFigures, name: str) -> None:
    """How many of the subject's drafts brought 1, 2, 3, … tokens, from the share that reached each depth."""
    reached = [1.0, *arm.spec_decode_per_position_acceptance_rates, 0.0]
    shares = [here - deeper for here, deeper in zip(reached, reached[1:], strict=False)]
    if not arm.spec_decode_num_drafts:
        axes.text(0.5, 0.5, "no guess was offered", ha="center", va="center", transform=axes.transAxes)
        shares = []
    places = range(1, len(shares) + 1)
    axes.bar(places, [100 * share for share in shares], color=COLOURS[0], width=0.7)
    for place, share in zip(places, shares, strict=True):
        axes.text(place, 100 * share, f"{share:.0%}", ha="center", va="bottom", fontsize=9)
    axes.set_xticks(list(places))
    axes.margins(y=0.12)
    mean = arm.tokens_per_step
    title = "Tokens a step" if mean is None else f"Tokens a step: {mean:.2f} on average"
    frame(axes, title, f"tokens gained in a step of {name}, bonus token counted", grid="y")
    axes.set_ylabel("% of steps", color=QUIET)


def _categories(axes: Any, report: Report, names: Sequence[str], categories: Sequence[str]) -> None:
    """Tokens a second of each arm in each category."""
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        cells = report.arms[name].categories
        values = [cells[category].output_throughput or 0.0 for category in categories]
        places = [place + (number - (len(names) - 1) / 2) * width for place in range(len(categories))]
        axes.bar(places, values, width * 0.92, label=name, color=_colour(number))
    tilted = len(categories) > 8
    labels = [category.replace("_", " ") for category in categories]
    axes.set_xticks(range(len(categories)), labels, rotation=30 if tilted else 0, ha="right" if tilted else "center")
    frame(axes, "By category", "", grid="y")
    axes.set_ylabel("tokens a second", color=QUIET)
    axes.figure.legend(frameon=False, ncols=min(len(names), 5), loc="outside lower center", fontsize=9)


def _colour(place: int) -> str:
    """The colour of the arm at this place."""
    return COLOURS[place % len(COLOURS)]
