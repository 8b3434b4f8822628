"""Damaged files by the thousand, each given to the reader that a command would call.

    python -m tests.fuzz.mutations --count 5000                    every kind, read in processes forked from this one
    python -m tests.fuzz.mutations --kind tree --only 17           one file again, with what it raises
    python -m tests.fuzz.mutations --count 40 --commands           a sample, through the program itself

Fine is: it is read, or refused with a MedusaError. A fault is anything else: another exception, a process that dies,
more than 10 seconds of its own, more than 2 GB. Kind, seed and number make the file, so each can be had again. What was
done is kept in --folder: the same command goes on.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from medusa_cli.errors import MedusaError
from tests.fuzz.kind import Kind
from tests.fuzz.kinds import KINDS
from tests.fuzz.mutator import mutated

SECONDS = 10.0
PATIENCE = 120.0  # of a clock on the wall: on a machine that is busy a process gets little of it
MOST_BYTES = 2 * 2**30
READ, REFUSED = "read", "refused"


@dataclass
class Done:
    """What became of the files of one kind."""

    kind: str
    seed: int
    done: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[dict[str, Any]] = field(default_factory=list)

    def note(self, number: int, victim: str, found: str) -> None:
        """One more file."""
        self.done = number + 1
        fine = found in (READ, REFUSED)
        self.counts[found if fine else "faults"] += 1
        if not fine:
            self.faults.append({"number": number, "victim": victim, "fault": found})


@dataclass(frozen=True)
class Bench:
    """One kind's valid folder, and a copy of it in which files are damaged."""

    kind: Kind
    name: str
    seed: int
    valid: Path
    copy: Path

    def damage(self, number: int) -> str:
        """Put file `number` in place, in a folder that is valid otherwise; says which file it is."""
        rng = random.Random(f"{self.seed} {self.name} {number}")
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self.valid, self.copy)
        victim = rng.choice(sorted(self.kind.victims))
        other = rng.choice(sorted(self.kind.victims))
        form = self.kind.victims[victim]
        content = mutated((self.valid / victim).read_bytes(), (self.valid / other).read_bytes(), form, rng)
        (self.copy / victim).write_bytes(content)
        if rng.random() < 0.8:
            self.kind.mend(self.copy, victim)
        return victim

    def read(self, number: int) -> tuple[str, str]:
        """The damaged file's name, and what its reader made of it."""
        victim = self.damage(number)
        with contextlib.chdir(self.copy):
            try:
                self.kind.read(Path("."), victim)
                return victim, READ
            except MedusaError as error:
                return victim, REFUSED if error.message.strip() and error.hint.strip() else "a refusal without words"
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # whatever it is: this is what is looked for
                return victim, f"{type(error).__name__}: {str(error)[:300]} at {_place(error)}"


def _place(error: BaseException) -> str:
    """The last line of ours that it went through."""
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "medusa_cli" in frame.filename]
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"


def make(name: str, seed: int, folder: Path) -> Bench:
    """The valid folder, made once."""
    valid = folder / "valid" / name
    if not (valid / ".made").exists():
        shutil.rmtree(valid, ignore_errors=True)
        valid.mkdir(parents=True)
        with contextlib.chdir(valid):
            KINDS[name].make(Path("."))
            KINDS[name].read(Path("."), next(iter(KINDS[name].victims)))
        (valid / ".made").touch()
    return Bench(KINDS[name], name, seed, valid.absolute(), (folder / "copy" / name).absolute())


def read_all(bench: Bench, count: int, kept: Done, file: Path) -> Done:
    """Files `kept.done` to `count`, in processes that are forked anew when one dies or hangs."""
    while kept.done < count:
        worker = _Worker(bench, kept.done, count)
        try:
            while (answer := worker.next()) is not None:
                kept.note(*answer)
                if kept.done % 50 == 0 or kept.done == count:
                    file.write_text(json.dumps({**asdict(kept), "counts": dict(kept.counts)}))
        finally:
            worker.end()
    return kept


class _Worker:
    """A process that reads one file after the other."""

    def __init__(self, bench: Bench, first: int, count: int) -> None:
        context = multiprocessing.get_context("fork")
        self._link, far = context.Pipe()
        self._number, self._count = first, count
        self._process = context.Process(target=_work, args=(bench, first, count, far))
        self._process.start()
        far.close()

    def next(self) -> tuple[int, str, str] | None:
        """The next file's number, name and fate; None when there is none, or the process has to be another."""
        if self._number == self._count or not self._process.is_alive() and not self._link.poll():
            return None
        begun, own = time.monotonic(), self._cpu()
        while not self._link.poll(0.5):
            used, waited = self._cpu() - own, time.monotonic() - begun
            if not self._process.is_alive():
                return self._lost(f"the process died: exit {self._process.exitcode}")
            if used > SECONDS or waited > PATIENCE:
                self._process.kill()
                return self._lost(f"hangs: {used:.0f} s of its own, {waited:.0f} s on the clock")
        try:
            victim, found = self._link.recv()
        except EOFError:
            self._process.join()
            return self._lost(f"the process died: exit {self._process.exitcode}")
        self._number += 1
        return self._number - 1, victim, found

    def end(self) -> None:
        """Whatever it does."""
        self._process.kill()
        self._process.join()

    def _lost(self, fault: str) -> tuple[int, str, str]:
        number, self._number = self._number, self._count  # the next worker goes on behind it
        return number, "?", fault

    def _cpu(self) -> float:
        """Seconds that the process has computed."""
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _work(bench: Bench, first: int, count: int, link: Any) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    os.environ["MEDUSA_HOME"] = str(bench.copy.parent / "home")
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + 2 * MOST_BYTES, held + 2 * MOST_BYTES))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for number in range(first, count):
        victim, found = bench.read(number)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
        if grown > MOST_BYTES:
            link.send((victim, f"took {grown / 2**30:.1f} GB, and then: {found}"))
            return
        link.send((victim, found))


def command(bench: Bench, number: int) -> tuple[str, str]:
    """One damaged file through the program itself, as a process of its own."""
    victim = bench.damage(number)
    args = [str(arg) for arg in bench.kind.command(Path("."), victim)]
    program = [sys.executable, "-m", "medusa_cli", *args]
    home = {"MEDUSA_HOME": str(bench.copy.parent / "home")}
    try:
        done = subprocess.run(
            program, cwd=bench.copy, env=os.environ | home, capture_output=True, text=True, errors="replace",
            timeout=PATIENCE, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return victim, f"hangs: {PATIENCE:.0f} s on the clock"
    said = done.stdout + done.stderr
    if done.returncode not in (0, 1, 2, 3) or "this is a bug" in said or "Traceback" in said:
        return victim, f"exit {done.returncode}: {' '.join(done.stderr.split())[-300:]}"
    return victim, READ if done.returncode == 0 else REFUSED


def _kept(file: Path, name: str, seed: int) -> Done:
    """What an earlier call did."""
    found = json.loads(file.read_text()) if file.exists() else {}
    if found.get("seed") != seed:
        return Done(name, seed)
    return Done(name, seed, found["done"], Counter(found["counts"]), found["faults"])


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 1 when a fault was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=5000, help="files of each kind")
    parser.add_argument("--kind", action="append", choices=[*KINDS], help="only this kind; may be given several times")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("runs/mutations"), help="where files and figures are kept")
    parser.add_argument("--only", type=int, metavar="N", help="file N alone, in this process")
    parser.add_argument("--commands", action="store_true", help="through the program itself, not its readers")
    asked = parser.parse_args(argv)
    asked.folder.mkdir(parents=True, exist_ok=True)
    faults = files = 0
    for name in asked.kind or KINDS:
        bench = make(name, asked.seed, asked.folder)
        if asked.only is not None:
            print(*(command if asked.commands else Bench.read)(bench, asked.only), f"in {bench.copy}")
            continue
        way = "commands" if asked.commands else "readers"
        file = asked.folder / f"{name}-{way}.json"
        kept = _kept(file, name, asked.seed)
        if asked.commands:
            for number in range(kept.done, asked.count):
                kept.note(number, *command(bench, number))
                file.write_text(json.dumps({**asdict(kept), "counts": dict(kept.counts)}))
        else:
            read_all(bench, asked.count, kept, file)
        print(f"{name}: {kept.done} files, {dict(kept.counts)}", flush=True)
        for fault in kept.faults:
            print(f"  {fault['number']} {fault['victim']}: {fault['fault']}", flush=True)
        faults, files = faults + len(kept.faults), files + kept.done
    print(f"{files} damaged files, {faults} faults", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
