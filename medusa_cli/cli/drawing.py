"""Bars and tables as wide as the terminal is; the least important goes first. The only file that knows rich.

Nothing drawn here is read as markup, and rich itself is imported when a bar or a table is first drawn.
"""

import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.table import Table as RichTable

BETWEEN = "  "  # stands between the parts of a bar's note
_BAR = 20  # columns, where there is room for them
_LEAST_BAR = 6
_USUAL = 80  # columns of a terminal that doesn't tell
_UNBOUND = 10_000  # wider than any table
_LEAST_CUT = 40  # columns of a cell that is cut: with fewer it says nothing


@dataclass(frozen=True)
class Bar:
    """A bar on stderr: how to redraw it with a note, and how to print a line above it."""

    draw: Callable[[float, str], None]
    print_above: Callable[[str], None]


@contextmanager
def bar(title: str, total: float | None, done: float) -> Iterator[Bar]:
    """A bar with count and time left; of the note, the parts that the line has room for."""
    from rich.console import Console as RichConsole
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress
    from rich.text import Text

    console = RichConsole(stderr=True)
    # title, count and time, each with a space behind it
    beside = len(title) + 2 * len(f"{total or done:.0f}") + len("/0:00:00") + 4
    wide = max(_LEAST_BAR, min(_BAR, console.width - beside))
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=wide),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )

    def fitted(note: str) -> str:
        return fitting(note, console.width - beside - wide - 1)

    # the command's own stdout is the result: rich must not redirect it into the bar's stream
    with RichProgress(*columns, console=console, transient=True, redirect_stdout=False) as drawn:
        task = drawn.add_task(title, total=total, completed=int(done), note="")
        yield Bar(
            lambda done, note: drawn.update(task, completed=done, note=fitted(note)),
            lambda line: drawn.console.print(Text(wrapped(line, sys.stderr)), soft_wrap=True),
        )


def width_of(stream: TextIO) -> int | None:
    """Columns there are to write in: those that the variable COLUMNS names, else the terminal's; None without both."""
    named = os.environ.get("COLUMNS", "")
    if named.isdecimal() and int(named):
        return int(named)
    if not stream.isatty():
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or _USUAL
    except (OSError, ValueError):
        return _USUAL


def wrapped(text: str, stream: TextIO, indent: int = 0) -> str:
    """The text with its lines broken between words where there are fewer columns; as it is where nothing bounds it.

    indent   spaces before each further line of a line
    """
    width = width_of(stream)
    if width is None:
        return text
    wrapper = textwrap.TextWrapper(
        width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(part for line in text.split("\n") for part in wrapper.wrap(line) or [""])


def fitting(note: str, room: int) -> str:
    """The first parts of a note that `room` columns hold, each of them whole."""
    shown = ""
    for part in note.split(BETWEEN):
        longer = f"{shown}{BETWEEN}{part}" if shown else part
        if len(longer) > room:
            break
        shown = longer
    return shown


@dataclass(frozen=True)
class Table:
    """Cells as text under the names of their columns.

    spare   columns that a narrow terminal leaves out, those to go first first
    cut     the last column, whose cells are cut between words to what room the others leave; "" for none
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    spare: Sequence[str] = ()
    cut: str = ""

    def without(self, name: str) -> "Table":
        """The same without this column."""
        kept = [index for index, column in enumerate(self.columns) if column != name]
        rows = [[row[index] for index in kept] for row in self.rows]
        return replace(self, columns=[self.columns[index] for index in kept], rows=rows)

    def within(self, room: int) -> "Table":
        """The same with the cells of the column `cut` shortened to so many columns."""
        if not self.cut:
            return self
        rows = [[*row[:-1], textwrap.shorten(row[-1], room, placeholder=" …")] for row in self.rows]
        return replace(self, rows=rows)


def draw_table(table: Table) -> Sequence[str]:
    """Print a table to stdout; the columns that were left out. Where nothing bounds the width nothing is cut."""
    from rich.console import Console as RichConsole

    width = width_of(sys.stdout)
    console = RichConsole(highlight=False, width=_UNBOUND if width is None else width)
    left_out = []
    if width is None:
        console.width = _width(table, console)
    else:
        least = table.within(_LEAST_CUT)
        for name in table.spare:
            if _width(least, console) <= width:
                break
            table, least = table.without(name), least.without(name)
            left_out.append(name)
        others = _width(table.without(table.cut), console) if table.cut else 0
        table = table.within(max(_LEAST_CUT, width - others - 2))
    with console.capture() as drawn:
        console.print(_as_rich(table, console.width))
    if table.title:
        print(wrapped(table.title, sys.stdout))
    print("\n".join(line.rstrip() for line in drawn.get().splitlines()).strip("\n"))
    return left_out


def _width(table: Table, console: "RichConsole") -> int:
    """Columns that the table takes when no cell is wrapped."""
    from rich.measure import Measurement

    return Measurement.get(console, console.options.update(width=_UNBOUND), _as_rich(table, _UNBOUND)).maximum


def _as_rich(table: Table, width: int) -> "RichTable":
    """The table with every cell as literal text: figures stay on one line, and words stay whole."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for index, column in enumerate(table.columns):
        cells = [row[index] for row in table.rows]
        numeric = bool(cells) and all(cell.lstrip("-")[:1].isdigit() or cell in ("", "-") for cell in cells)
        longest = max(len(word) for text in (column, *cells) for word in text.split() or [""])
        drawn.add_column(
            Text(column),
            justify="right" if numeric else "left",
            overflow="fold",
            no_wrap=numeric,
            min_width=min(longest, width // 2),
        )
    for row in table.rows:
        drawn.add_row(*map(Text, row))
    return drawn
