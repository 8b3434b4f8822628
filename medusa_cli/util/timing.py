"""Interleaved timing: several pieces of work in turn, round by round, after one round to warm up. Knows no torch.

What disturbs a measurement only ever adds to it, so the least of a few rounds is what the work takes by itself; how far
the middle lies above the least says whether it was left alone.
"""

import math
import statistics
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from medusa_cli.util.busy import Meter

Name = TypeVar("Name", bound=Hashable)

MOST_SPREAD = 0.25  # of the least, by which the middle round takes longer on a quiet machine at most


@dataclass(frozen=True)
class Times:
    """Seconds of one piece of work, by round; the round that warms up is left out."""

    seconds: tuple[float, ...]

    @property
    def least(self) -> float:
        """Seconds when nothing else got in the way."""
        return min(self.seconds)

    @property
    def median(self) -> float:
        """Seconds of the middle round."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """By how much of the least the middle round took longer."""
        return self.median / self.least - 1.0 if self.least > 0 else 0.0


def interleaved(
    work: Mapping[Name, Callable[[], object]],
    now: Callable[[], float],
    *,
    rounds: int,
    patience_s: float = math.inf,
) -> dict[Name, Times]:
    """Time every piece of work once a round, so that a busy moment of the machine hits them alike.

    now      a clock that has waited for whatever the work was given to (see model/clock.py)
    rounds   after the one that warms up, as long as patience lasts and one at least
    """
    seconds: dict[Name, list[float]] = {name: [] for name in work}
    started = now()
    for round_ in range(rounds + 1):
        for name, run in work.items():
            begun = now()
            run()
            seconds[name].append(now() - begun)
        if round_ and now() - started > patience_s:
            break
    # the first round warms up: allocations, and kernels that are chosen once
    return {name: Times(tuple(times[1:])) for name, times in seconds.items()}


def widest_spread(times: Mapping[Name, Times]) -> float:
    """The spread of the work that was hit most."""
    return max((each.spread for each in times.values()), default=0.0)


def was_disturbed(spread: float, meter: Meter) -> bool:
    """Whether rounds differed by so much, or others had the processor while the meter ran, that times say little."""
    return spread > MOST_SPREAD or meter.read().busy
