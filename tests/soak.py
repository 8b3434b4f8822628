"""Kills training runs again and again, and compares what they leave with runs that nothing stopped: `make soak`.

Each run is killed, started again with --resume-from-checkpoint, killed again, until it ends. The program runs in a
copy of this process (torch is there already), which dies as by kill -9 in one of three ways:

line   before a line of code that a file operation is made from: which functions those are is learnt from an unbroken
       run, so that new code is covered without being named here
byte   in the middle of a write: the system lets no file grow past so many bytes
time   at any moment

And it may be refused: as on a full disk, no file grows past so many bytes (full). Such a run must end with one error
and one hint, and go on when there is room.

    python -m tests.soak --kills 100            kills, spread over all lines
    python -m tests.soak --kills 0 --all-lines  every line once
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# as tests/conftest.py, for a program of its own
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

from tests.cli.harness import LAYOUTS, in_two_lines, make_model, rows_of, run_here, train_args
from tests.deaths import Death, Ended, Site, Watched, at_byte, at_line, at_time, attempt, shown, when_full
from tests.run_folders import differences

MANY = 40  # kills after which a run is let go to its end


@dataclass(frozen=True)
class Kind:
    """A run to be killed: its settings, and whether what it leaves must be equal to the last bit.

    Rows that are written side by side round as their neighbours let them, and a kill changes who these are: then the
    hidden states may differ in their last bits, and what is learnt from them is compared with a run over the same.
    """

    name: str
    settings: Sequence[object]
    exact: bool = True


SMALL = (
    "data.max_prompt_tokens=8", "data.max_answer_tokens=12", "train.batch_size=24", "tree.max_size=6", "--num-samples",
    10, "--epochs", 2, "--save-steps", 3, "--eval-steps", 4, "--tree-size", 5, "--runner", "eager", "-q",
    "--decode-steps", 2, "--patience", 2,
)  # fmt: skip
KINDS = (
    Kind("one text at a time", ("data.rows=1",)),
    Kind("four texts side by side", ("data.rows=4",), exact=False),
    Kind("answers of a data set", ("data.rows=1", "--dataset", "DATA")),
    Kind("hydra heads", ("data.rows=1", "--heads-type", "hydra", "heads.own_output=true")),
    Kind("block heads", ("data.rows=1", "--heads-type", "block", "heads.options={rank: 4}")),
)


@dataclass
class Tally:
    """What a soak has done: kills by how they came, those at lines by file, and what was found wrong."""

    kills: dict[str, int] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    runs: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Kills; a full disk kills nobody."""
        return sum(count for kind, count in self.kills.items() if kind != "full")


class Soak:
    """All runs of one kind against one that nothing stopped."""

    def __init__(self, kind: Kind, room: Path, seed: int, tally: Tally, say: Callable[[str], None]) -> None:
        self.kind, self.room, self.tally, self.say = kind, room, tally, say
        self.rng = random.Random(seed)
        self.seed = seed
        data = room / "data.jsonl"
        if not data.exists():
            data.write_text(rows_of(10, LAYOUTS["messages"]))
        settings = [data if setting == "DATA" else setting for setting in kind.settings]
        self.settings = [*settings, *SMALL, "--seed", seed]
        self.unbroken = room / "unbroken"
        self.watched = Watched()
        self.seconds = 1.0

    def args(self, folder: Path) -> list[object]:
        return [*train_args(self.room / "model", folder), *self.settings, "--resume-from-checkpoint"]

    def prepare(self) -> None:
        """Three unbroken runs: which code writes, where it passes, and how long it all takes. All must be equal."""
        for name in ("unbroken", "counted"):
            shutil.rmtree(self.room / name, ignore_errors=True)
        self.watched.writers(self.unbroken, lambda: self._whole(self.unbroken))
        self.watched.count(lambda: self._whole(self.room / "counted"))
        began = time.monotonic()
        shutil.rmtree(self.room / "counted-2", ignore_errors=True)
        self._end(attempt(self.args(self.room / "counted-2")), "an unbroken run")
        self.seconds = time.monotonic() - began
        self.tally.faults += differences(self.unbroken, self.room / "counted-2", exact=True)
        files = {file for file, _ in self.watched.lines}
        self.say(f"{self.kind.name}: {len(self.watched.lines)} lines of {len(files)} files can be died at")

    def _whole(self, folder: Path) -> None:
        done = run_here(*self.args(folder))
        assert done.code == 0, done.err

    def _end(self, ended: Ended, what: str) -> bool:
        if ended.code:
            self.tally.faults.append(f"{what} ended with {ended.code}: {ended.said.strip()[-300:]}")
        return not ended.code

    def run(self, deaths: Sequence[Death]) -> list[Death]:
        """One run killed by these deaths, one after the other, until it ends; those left. Its folder is compared.

        A run that passed its death by has ended: that death is left too.
        """
        folder = self.room / "broken"
        shutil.rmtree(folder, ignore_errors=True)
        killed: list[str] = []
        ended = Ended(0, "")
        left = list(deaths)
        for death in deaths:
            ended = attempt(self.args(folder), death)
            if ended.code not in ((1,) if death.refused else (-signal.SIGKILL, -signal.SIGXFSZ)):
                break
            if death.refused and not in_two_lines(ended.said):
                break
            left.remove(death)
            killed.append(death.words)
            kind = death.words.split()[0]
            self.tally.kills[kind] = self.tally.kills.get(kind, 0) + 1
            if death.site:
                file = shown(death.site).partition(":")[0]
                self.tally.files[file] = self.tally.files.get(file, 0) + 1
        else:
            ended = attempt(self.args(folder))
        self.tally.runs += 1
        found = [] if ended.code == 0 else [f"the last start ended with {ended.code}: {ended.said.strip()[-300:]}"]
        found = found or differences(self.unbroken, folder, exact=self.kind.exact) + self._relearnt(folder)
        self.tally.faults += [
            f"{self.kind.name}, seed {self.seed}, after {', '.join(killed[-3:])}: {one}" for one in found
        ]
        verdict = "equal" if not found else "; ".join(found)
        self.say(f"{self.kind.name}, seed {self.seed}: {len(killed)} kills, {verdict}")
        return left

    def _relearnt(self, folder: Path) -> list[str]:
        """Differences from what an unbroken run learns from the same states, where states may differ."""
        if self.kind.exact:
            return []
        again = self.room / "again"
        shutil.rmtree(again, ignore_errors=True)
        again.mkdir()
        for name in ("run.json", "written"):
            copy = shutil.copytree if (folder / name).is_dir() else shutil.copy
            copy(folder / name, again / name)
        ended = attempt(self.args(again))
        if not self._end(ended, "a run over the same states"):
            return []
        return differences(again, folder, exact=True)

    def line_deaths(self, count: int | None) -> list[Death]:
        """Deaths at `count` lines, or at all, in the order they are reached."""
        sites = list(self.watched.lines)
        if count is not None:
            sites = sorted(self.rng.sample(sites, min(count, len(sites))), key=sites.index)
        return [self._at(site, self.rng.randint(1, min(3, self.watched.lines[site]))) for site in sites]

    def die_at_lines(self, deaths: Sequence[Death]) -> None:
        """Runs until each of these deaths came. One that was passed by comes first in a run of its own, at once."""
        left, tried = list(deaths), set[Site]()
        while left:
            left = self.run(left)
            if left and (site := left[0].site):
                left[:1] = [] if site in tried else [self._at(site, 1)]
                tried.add(site)

    def _at(self, site: Site, times: int) -> Death:
        return at_line(site, times, frozenset(self.watched.codes))

    def any_death(self) -> Death:
        """A death in the middle of a write or at any moment, or a full disk."""
        longest = max(file.stat().st_size for file in self.unbroken.rglob("*") if file.is_file())
        # most files are short
        size = int(longest ** self.rng.uniform(0.4, 1.0))
        return self.rng.choice([at_byte(size), when_full(size), at_time(self.rng.uniform(0.0, self.seconds))])


def soak(kinds: Sequence[Kind], kills: int, seed: int, say: Callable[[str], None], *, all_lines: bool = False) -> Tally:
    """At least `kills` kills spread over these kinds of runs; with `all_lines`, one at every line besides."""
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="medusa-soak-") as place:
        room = Path(place)
        os.environ.update(MEDUSA_HOME=str(room / "home"), MEDUSA_TRACEBACK="1")
        make_model(room / "model")
        _measure_quickly()
        for number, kind in enumerate(kinds):
            one = Soak(kind, room, seed + number, tally, say)
            one.prepare()
            wanted = -(-kills * (number + 1) // len(kinds))
            deaths = one.line_deaths(None if all_lines else max(0, wanted - tally.total) * 2 // 3)
            # every so-manieth line, so that each run dies in every stage
            runs = max(1, len(deaths) // MANY + 1)
            for start in range(runs):
                one.die_at_lines(deaths[start::runs])
            while tally.total < wanted and not tally.faults:
                one.run([one.any_death() for _ in range(min(MANY, wanted - tally.total))])
    return tally


def _measure_quickly() -> None:
    """What a step costs is measured once: costs differ from run to run and are not compared."""
    from medusa_cli.pipeline import tree_fit

    tree_fit.COST_REPEATS = tree_fit.DRAFT_REPEATS = 1


def _report(tally: Tally, seconds: float) -> str:
    counts = ", ".join(f"{kind} {count}" for kind, count in sorted(tally.kills.items()))
    head = f"{tally.total} kills ({counts}) in {tally.runs} runs, {seconds:.0f} s: {len(tally.faults)} differences"
    lines = ", ".join(f"{count} in {file}" for file, count in sorted(tally.files.items()))
    return "\n".join([head, f"at lines: {lines}", *tally.faults])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line: 1 when anything differs."""
    parser = argparse.ArgumentParser(description="Kill training runs, start them again, compare what they leave.")
    parser.add_argument("--kills", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all-lines", action="store_true", help="die once at every line that a file is written from")
    names = [kind.name for kind in KINDS]
    parser.add_argument("--kind", choices=names, action="append", help="only runs of this kind; may be given again")
    given = parser.parse_args(argv)
    began = time.monotonic()
    kinds = [kind for kind in KINDS if kind.name in (given.kind or names)]
    tally = soak(kinds, given.kills, given.seed, lambda line: print(line, flush=True), all_lines=given.all_lines)
    print(_report(tally, time.monotonic() - began))
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
