"""What all pictures share: which files they may be, how they look, how they are saved. Needs the extra `plot`."""

import os
from pathlib import Path
from typing import Any

from medusa_cli.errors import DataError
from medusa_cli.util.optional import need

ENDINGS = (".png", ".svg", ".pdf")
# Okabe and Ito's colours, told apart by the colour-blind too
COLOURS = ("#0072B2", "#999999", "#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#D55E00")
QUIET = "#555555"


def check_plot_file(file: Path) -> None:
    """Raise before a long run: DataError for an ending that is no picture, MissingExtra without matplotlib."""
    if file.suffix.lower() not in ENDINGS:
        raise DataError(f"'{file.name}' is no picture file", f"end the name in one of {', '.join(ENDINGS)}")
    if not file.absolute().parent.is_dir():
        raise DataError(f"the folder of {file} does not exist", f"make it first: mkdir -p {file.parent}")
    if file.is_dir() or not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise DataError(f"can't write {file}", "name a file in a folder you can write to")
    need("matplotlib", "plot")


def new_figure(width: float, height: float) -> Any:
    """An empty figure of this size in inches that makes room for its labels."""
    return need("matplotlib.figure", "plot").Figure(figsize=(width, height), layout="constrained")


def frame(axes: Any, title: str, below: str, grid: str = "x") -> None:
    """The look all panels share."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(below, color=QUIET)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="#e5e5e5")
    axes.set_axisbelow(True)


def save(figure: Any, file: Path) -> None:
    """Write the picture; the ending of `file` picks the format. Raises DataError where it can't be written."""
    try:
        figure.savefig(file, dpi=150)
    except OSError as error:
        raise DataError(
            f"can't write {file}: {error.strerror}", "free some space; --output-json keeps figures"
        ) from error
