"""The table of docs/exactness.md over every architecture of the library, from the lines that `run` wrote.

python -m tests.differential.page FILE…
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import transformers

from tests.differential.run import read
from tests.differential.variants import BASE

DOCUMENT = Path(__file__).parents[2] / "docs" / "exactness.md"
BEGIN, END = "<!-- table of every architecture -->\n", "<!-- end of every architecture -->\n"
_WORDS = {
    "refused": "",
    "self-check": "refused by the check of logits: ",
    "differs": "DIFFERS: ",
    "broken": "FAILS: ",
    "unbuilt": "not to be had: ",
}
Line = Mapping[str, object]


@dataclass(frozen=True)
class Architecture:
    """All cases of one architecture."""

    name: str
    lines: Sequence[Line]

    @property
    def written(self) -> list[Line]:
        """Cases whose texts were compared."""
        return [line for line in self.lines if line["outcome"] in ("equal", "tie", "differs")]

    def total(self, field: str) -> int:
        """A number over all cases."""
        return sum(int(str(line[field])) for line in self.lines)

    @property
    def runs(self) -> bool:
        """Whether it is written with, as it comes."""
        return any(line["variant"] == BASE for line in self.written)

    def notes(self) -> str:
        """What is refused, differs or can't be had, as it comes or in a variant."""
        told: dict[str, list[str]] = {}
        for line in self.lines:
            if line["outcome"] not in ("equal", "tie") and not _is_no_setting(line):
                told.setdefault(f"{_WORDS[str(line['outcome'])]}{self._reason(line)}", []).append(str(line["variant"]))
        return "; ".join(_of(ways) + why for why, ways in told.items())

    def _reason(self, line: Line) -> str:
        """The reason without the name that stands in the first column, in one cell."""
        return str(line["reason"]).removeprefix(f"{self.name} ").removeprefix(f"({self.name}) ").replace("|", "/")


def _of(variants: Sequence[str]) -> str:
    """Which variants a reason is about; nothing where it is the config as it comes, and so all of them."""
    return "" if BASE in variants else f"{', '.join(dict.fromkeys(variants))}: "


def _is_no_setting(line: Line) -> bool:
    """A variant that the library itself can't make or run is none of this architecture's."""
    return line["outcome"] == "unbuilt" and line["variant"] != BASE


def architectures(lines: Sequence[Line]) -> list[Architecture]:
    """The cases, by architecture."""
    names = sorted({str(line["model_type"]) for line in lines})
    return [Architecture(name, [line for line in lines if line["model_type"] == name]) for name in names]


def page(lines: Sequence[Line]) -> Iterator[str]:
    """Markdown: the sum, what is written with, what is refused."""
    found = architectures(lines)
    runs = [each for each in found if each.runs]
    others = [each for each in found if not each.runs]
    compared, differed, ties = (sum(each.total(field) for each in found) for field in ("compared", "differed", "ties"))
    yield f"transformers {transformers.__version__}: {len(found)} architectures, {len(runs)} of them written with in "
    yield f"{sum(len(each.written) for each in runs):,} settings, {len(others)} refused or not to be had. "
    yield f"**{compared:,} tokens compared, {differed:,} differ**"
    yield f" ({ties} texts part at near ties)." if ties else "."
    yield "\n\n| architecture | settings | tokens compared | differ | apart from that |\n|---|---|---|---|---|\n"
    for each in runs:
        counts = f"{len(each.written)} | {each.total('compared'):,} | {each.total('differed'):,}"
        yield f"| {each.name} | {counts} | {each.notes()} |\n"
    yield "\n| not written with | why |\n|---|---|\n"
    for each in others:
        yield f"| {each.name} | {each.notes()} |\n"


def documented(text: str) -> set[str]:
    """The architectures that a document of ours says can be written with."""
    table = text.partition(BEGIN)[2].partition("| not written with |")[0]
    return {line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")} - {"architecture"}


def main(files: Sequence[str]) -> int:
    """Write the section; 1 when any token differs or a case broke."""
    lines = [line for file in files for line in read(Path(file))]
    text = DOCUMENT.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    DOCUMENT.write_text(f"{before}{BEGIN}\n{''.join(page(lines))}\n{END}{after}", encoding="utf-8")
    return int(any(line["outcome"] in ("differs", "broken") for line in lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
