"""The table of docs/exactness.md: texts of tiny random models with guesses, against the library's own without.

`make exactness` writes it. The laws hold the same in the tests, on fewer combinations; here everything is counted.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.progress import track

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.acceptance.lossless import Lossless
from medusa_cli.contracts import AcceptanceRule
from medusa_cli.decode.loop import Parts, collect
from medusa_cli.decode.rows import Limits
from medusa_cli.errors import TargetError
from medusa_cli.model.target import Target
from tests.fakes import DRAFTERS, SHAPES
from tests.tiny_models import ARCHITECTURES, NUM_NEW, SAMPLED, SEED, Known, known, sampled, target_of, tiny_model

DOCUMENT = Path(__file__).parents[1] / "docs" / "exactness.md"
BEGIN, END = "<!-- table of `make exactness` -->\n", "<!-- end of table -->\n"
# shape of tree, rows side by side
RUNS = [("chain", 1), ("wide", 1), ("wide", 3), ("dynamic", 3), ("padded", 3)]
RUNNERS = ("eager", "packed", "compiled")
REFUSED = "–"  # the compiled runner has no program for this model, or no kernel for this attention
RULES: dict[str, tuple[AcceptanceRule, Callable[[str], Known]]] = {
    "greedy": (Greedy(), known),
    "lossless": (Lossless(*SAMPLED), sampled),
}


@dataclass(frozen=True)
class Cell:
    """How many tokens were compared and how many of them differed."""

    compared: int
    differed: int


def cell_of(target: Target, rule: AcceptanceRule, texts: Known) -> Cell:
    """Every run of this target under this rule, against these texts."""
    wanted = texts.wanted(len(texts.prompts))
    compared = differed = 0
    for shape, num_rows in RUNS:
        for drafter in DRAFTERS:
            parts = Parts(target, DRAFTERS[drafter](texts.texts, SHAPES[shape]), rule, seed=SEED)
            found = collect(parts, texts.prompts, Limits(NUM_NEW), max_rows=num_rows)
            compared += sum(map(len, wanted))
            differed += sum(_differing(one.token_ids, other) for one, other in zip(found, wanted, strict=True))
    return Cell(compared, differed)


def _differing(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens from the first difference on: after it the texts have nothing to do with each other."""
    same = next((place for place, pair in enumerate(zip(one, other, strict=True)) if len(set(pair)) > 1), len(other))
    return len(other) - same


def table() -> Iterator[str]:
    """The lines of the table, one for each architecture and attention; as many at once as there are processors."""
    columns = [f"{rule}, {runner}" for rule in RULES for runner in RUNNERS]
    yield f"| architecture | attention | {' | '.join(columns)} |"
    yield "|---|---|" + "---|" * len(columns)
    kinds = [(name, attention) for name, found in ARCHITECTURES.items() for attention in found.attentions]
    # forked processes would share the parent's threads
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(mp_context=spawned, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield from track(pool.map(_line, *zip(*kinds, strict=True)), "comparing", total=len(kinds))


def _line(name: str, attention: str) -> str:
    """One line of the table."""
    targets = {runner: _target(name, attention, runner) for runner in RUNNERS}
    cells = [_cell_text(targets[runner], *rule, name) for rule in RULES.values() for runner in RUNNERS]
    return f"| {name} | {attention} | " + " | ".join(cells) + " |"


def _target(name: str, attention: str, runner: str) -> Target | None:
    """A tiny target; None where the compiled runner refuses it."""
    try:
        return target_of(tiny_model(name), attention, runner)
    except TargetError:
        if runner != "compiled":
            raise
        return None


def _cell_text(target: Target | None, rule: AcceptanceRule, texts: Callable[[str], Known], name: str) -> str:
    """One cell in words."""
    if target is None:
        return REFUSED
    cell = cell_of(target, rule, texts(name))
    return f"{cell.differed} of {cell.compared:,}"


def main() -> int:
    """Write the table; 1 when any token differed."""
    with TemporaryDirectory() as home:  # compiled programs of tiny models are of no use to anybody afterwards
        os.environ["MEDUSA_HOME"] = home
        lines = list(table())
    counted = [cell.split(" of ") for line in lines[2:] for cell in line.split("|")[3:-1] if cell.strip() != REFUSED]
    differed, compared = (sum(int(pair[side].replace(",", "")) for pair in counted) for side in (0, 1))
    lines += ["", f"In all, {differed} of {compared:,} tokens differed."]
    text = DOCUMENT.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    DOCUMENT.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n\n{END}{after}", encoding="utf-8")
    return int(differed > 0)


if __name__ == "__main__":
    sys.exit(main())
