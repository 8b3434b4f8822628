"""Tables as Markdown, for model cards and pages."""

from collections.abc import Sequence


def table_of(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table; every row has a cell for each header, and an empty cell is one space wide."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines)
