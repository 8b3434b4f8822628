"""The dashboard's panels as one picture, drawn from what a Prometheus holds.

`python -m tests.tools.draw_dashboard --url http://127.0.0.1:9090 --minutes 10 -o docs/dashboard.png`
"""

import argparse
import io
import json
import time
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from medusa_cli.plots.style import COLOURS, frame, new_figure
from tests.prometheus import DASHBOARD, Prometheus, queries

# how a panel's unit is written beside its axis
FORMS: dict[str, Callable[[float, int], str]] = {
    "percentunit": lambda value, _: f"{100 * value:g} %",
    "s": lambda value, _: f"{value:g} s",
    "bytes": lambda value, _: f"{value / 1e6:,.0f} MB",
}


def draw(found: Prometheus, minutes: float, file: Path, step: str = "5") -> None:
    """Ask for each query's range, and draw a panel for each title."""
    now = time.time()
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    unit_of = {panel["title"]: panel["fieldConfig"]["defaults"]["unit"] for panel in panels}
    titles = list(unit_of)
    figure = new_figure(16, 3 * -(-len(titles) // 3))
    axes_of = dict(zip(titles, figure.subplots(-(-len(titles) // 3), 3).flat, strict=False))
    drawn: dict[str, int] = dict.fromkeys(titles, 0)
    for title, legend, query in queries("30s"):
        series = found.ask("query_range", query=query, start=now - 60 * minutes, end=now, step=step)["result"]
        for each in series:
            label = legend
            for name, value in each["metric"].items():
                label = label.replace("{{" + name + "}}", value)
            times = [(float(when) - now) / 60 for when, _ in each["values"]]
            colour = COLOURS[drawn[title] % len(COLOURS)]
            axes_of[title].plot(times, [float(value) for _, value in each["values"]], color=colour, label=label)
            drawn[title] += 1
    for title, axes in axes_of.items():
        frame(axes, title, "minutes", grid="y")
        axes.set_ylim(bottom=0)
        if (form := FORMS.get(unit_of[title])) is not None:
            axes.yaxis.set_major_formatter(form)
        if drawn[title]:
            axes.legend(frameon=False, fontsize=8, loc="best")
    drawing = io.BytesIO()
    figure.savefig(drawing, dpi=90)
    Image.open(drawing).convert("RGB").quantize(255, dither=Image.Dither.NONE).save(file, optimize=True)


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    draw(Prometheus(given.url), given.minutes, given.output)


if __name__ == "__main__":
    main()
