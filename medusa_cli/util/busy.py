"""CPU contention: how long this process's threads were ready to run while others had the cores; how they wait.

The kernel counts, for every thread, the time it waited in line (schedstat), and for a virtual machine the time that its
host gave to others (steal). Where neither is told, the load average has to do.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DISTURBED = 0.1  # seconds of waiting a second, all threads together: a quiet machine shows a hundredth
SPINS = "100"
"""Turns that an OpenMP thread waits awake for the next piece of work before it sleeps: a few microseconds.

GNU OpenMP's own 300,000 are milliseconds, which a thread spends while the one it waits for has no core. On a machine at
rest that is right: to wake a thread that sleeps takes longer than most pauses of a step.
"""
LOOKS, BETWEEN_S = 5, 0.004  # times that running processes are counted at the start, and seconds in between
SPINNING = "spinning, as OpenMP's own default is: set GOMP_SPINCOUNT before torch is imported"
_HOW_TO_WAIT = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_THREADS, _STAT = Path("/proc/self/task"), Path("/proc/stat")
_STEAL = 8  # the column of /proc/stat, the name counted


def spin_briefly(environment: MutableMapping[str, str], running: Callable[[], int | None] | None = None) -> None:
    """Where others have the cores now, have OpenMP's threads sleep soon when there is nothing to do.

    The user's own word wins. Read when torch is imported, here and in processes started from here: afterwards it is too
    late, and nothing is set.

    running   how many processes run or want to, this one included; None where nobody tells
    """
    if "torch" not in sys.modules and not any(name in environment for name in _HOW_TO_WAIT):
        counts = [_look(running or _running) for _ in range(LOOKS)]
        if statistics.median(counts) > cores():
            environment["GOMP_SPINCOUNT"] = SPINS


def _look(running: Callable[[], int | None]) -> int:
    time.sleep(BETWEEN_S)
    return running() or 0


def _running() -> int | None:
    """Threads of all processes that run or want to now, this one's included."""
    try:
        return int(Path("/proc/loadavg").read_text(encoding="ascii").split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return None


def how_threads_wait(environment: Mapping[str, str]) -> str:
    """What OpenMP was told; nothing where it spins, as is its own default."""
    return ", ".join(f"{name}={environment[name]}" for name in _HOW_TO_WAIT if name in environment)


@dataclass(frozen=True)
class Contention:
    """What others took of the processor over some time.

    waiting        seconds a second that our threads stood in line for a core, added up; None where nobody counts
    stolen         share of the processors' time that the host of a virtual machine gave away; None likewise
    load_average   processes that ran or wanted to, over the last minute; None likewise
    cores          that this process may use
    """

    waiting: float | None
    stolen: float | None
    load_average: float | None
    cores: int

    @property
    def busy(self) -> bool:
        """Whether times taken meanwhile say more of the neighbours than of the work."""
        if self.waiting is None:
            return self.load_average is not None and self.load_average > self.cores + 0.5
        return self.waiting + (self.stolen or 0.0) * self.cores > DISTURBED

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "busy": self.busy}

    def in_words(self) -> str:
        """One line."""
        where = "the core" if self.cores == 1 else f"one of the {self.cores} cores"
        told = []
        if self.waiting is not None:
            told.append(f"our threads waited {100 * self.waiting:.0f} % of the time for {where}")
        if self.load_average is not None:
            on = "" if told else f" for {where}"
            told.append(f"{self.load_average:.1f} processes ran or waited{on}, as a mean of the last minute")
        if self.stolen is not None and self.stolen >= 0.01:
            told.append(f"{100 * self.stolen:.0f} % of the time went to other machines of the host")
        return f"{'busy' if self.busy else 'quiet'}: {'; '.join(told) or 'nobody counts'}"


class Meter:
    """Contention since it was made, or read last."""

    def __init__(self) -> None:
        self._before = _now()

    def read(self) -> Contention:
        """What others took since then."""
        before, self._before = self._before, _now()
        return between(before, self._before)


@dataclass(frozen=True)
class Counters:
    """What the kernel has counted by some moment."""

    at: float
    waited: dict[str, float]
    stolen: float | None
    all_ticks: float


def between(before: Counters, after: Counters) -> Contention:
    """Contention from one moment to the other. A thread that was born meanwhile counts from its birth."""
    seconds = max(after.at - before.at, 1e-6)
    waiting = None
    if after.waited:
        waiting = (
            sum(max(0.0, waited - before.waited.get(name, 0.0)) for name, waited in after.waited.items()) / seconds
        )
    stolen = None
    if before.stolen is not None and after.stolen is not None and after.all_ticks > before.all_ticks:
        stolen = (after.stolen - before.stolen) / (after.all_ticks - before.all_ticks)
    return Contention(waiting, stolen, _load_average(), cores())


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _now() -> Counters:
    ticks = _ticks()
    return Counters(time.perf_counter(), _waited(), ticks[_STEAL - 1] if ticks else None, sum(ticks))


def _waited() -> dict[str, float]:
    """Seconds that each thread stood in line, by its number; nothing where the kernel doesn't count."""
    found = {}
    for thread in _THREADS.glob("*/schedstat"):
        try:
            found[thread.parent.name] = int(thread.read_text(encoding="ascii").split()[1]) / 1e9
        except (OSError, ValueError, IndexError):  # it ended meanwhile
            continue
    return found


def _ticks() -> list[float]:
    """All processors' time by what it went to; nothing where the kernel doesn't tell."""
    try:
        first = _STAT.read_text(encoding="ascii").partition("\n")[0].split()[1 : _STEAL + 1]
    except OSError:
        return []
    return [float(number) for number in first] if len(first) == _STEAL else []


def _load_average() -> float | None:
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return None
