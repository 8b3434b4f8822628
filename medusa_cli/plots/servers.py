"""A bench of servers as a picture: tokens a second and waiting times by load. Needs the extra `plot`."""

from pathlib import Path
from typing import Any

from medusa_cli.bench.server_report import ServerReport, level_name
from medusa_cli.plots.style import COLOURS, check_plot_file, frame, new_figure, save


def draw(report: ServerReport, file: Path) -> None:
    """Write the picture; the ending of `file` picks the format."""
    check_plot_file(file)
    figure = new_figure(11, 4.6)
    left, middle, right = figure.subplots(1, 3)
    _lines(left, report, "Tokens a second", lambda arm: [arm.output_throughput])
    _lines(middle, report, "To the first words, ms", lambda arm: [arm.ttft_ms.p50, arm.ttft_ms.p99])
    _lines(right, report, "To the end, ms", lambda arm: [arm.e2e_ms.p50, arm.e2e_ms.p99])
    figure.legend(*left.get_legend_handles_labels(), frameon=False, ncols=4, loc="outside lower center", fontsize=9)
    figure.suptitle(f"{report.model} · {report.num_prompts} prompts of {report.max_new_tokens} new tokens", fontsize=13)
    save(figure, file)


def _lines(axes: Any, report: ServerReport, title: str, values_of: Any) -> None:
    """One line for each arm; the second value of each is dashed."""
    places = range(len(report.levels))
    for number, name in enumerate(report.levels[0].arms):
        found = [values_of(level.arms[name]) for level in report.levels]
        for which, style in zip(range(len(found[0])), ("-", "--"), strict=False):
            values = [each[which] if each[which] is not None else float("nan") for each in found]
            colour = COLOURS[number % len(COLOURS)]
            axes.plot(places, values, style, marker="o", color=colour, label=name if style == "-" else None)
    axes.set_xticks(list(places), [level_name(level) for level in report.levels])
    axes.set_ylim(bottom=0)
    frame(axes, title, "clients" if title == "Tokens a second" else "clients (dashed: p99)", grid="y")
