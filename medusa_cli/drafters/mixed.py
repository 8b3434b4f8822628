"""A drafter of guesses that are gathered on the host, from one source or several, under one budget of nodes.

`suffix` is this with one source; `mixed` adds the heads. Whoever can guess tokens can be a source.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from medusa_cli.contracts import Context, Draft, Drafter
from medusa_cli.drafters.memory import SharedMemory
from medusa_cli.drafters.source import Source
from medusa_cli.drafters.step_costs import Lap, Laps, LapTimes, Pace
from medusa_cli.drafters.trie import Picked, Trie, draft_of
from medusa_cli.drafters.worth import Sources

# steps from a plain one to the next, and between tries of more guesses than seem to pay: soon at first, then rarely
PLAIN_FIRST, PLAIN_EVERY = 8, 64
TRY_FIRST, TRY_EVERY = 4, 256
SLOWLY = 0.02  # weight of the latest step in how far chances are trusted
FORGIVEN = 0.02  # of that, in a step without guesses
LEAST_TRUST = 0.05  # guesses that are all wrong are still made where they are surest
DOUBT = 0.5  # of what a node costs on average where it costs least: the last of them may cost less


class HeadsDrafter(Drafter, Source, Protocol):
    """Heads in a shape draft by themselves, and are a source among others."""


class Budget:
    """How many nodes pay: at most `size`, and no more than their chances are worth at this machine's pace.

    n guesses under each root bring 1 token and their chances summed, and take the seconds of a step of that size. At R
    tokens a second so far, the n is taken that is most tokens ahead of R: what the step brings, less R times what it
    takes. Chances are trusted as far as they came true lately. Without a pace, `size` nodes are always taken.

    What is never tried can't be learnt. So the first step is plain and others are now and then, and now and then
    about twice as many guesses are made as seem to pay: a table that calls them dear is found out.
    """

    def __init__(self, size: int, pace: Pace | None = None) -> None:
        self.size = size
        self.pace = pace
        self._kept = self._hoped = 1.0  # guesses a step, and the chances they were given
        self._promised = 0.0
        self._plain = _Turn(PLAIN_FIRST, PLAIN_EVERY, left=0)
        self._more = _Turn(TRY_FIRST, TRY_EVERY, left=TRY_FIRST)

    @property
    def trust(self) -> float:
        """What a chance has been worth."""
        return self._kept / self._hoped

    def floor(self, num_rows: int) -> float:
        """A chance that pays for no node: sources needn't look for guesses below it."""
        if self.pace is None or not self.size or self._more.due:
            return 0.0
        plain = self.pace.seconds(num_rows)
        cost = min((self.pace.seconds(num_rows * (n + 1)) - plain) / n for n in range(1, self.size + 1))
        return max(0.0, DOUBT * self.pace.tokens_a_second * cost / max(self.trust, LEAST_TRUST))

    def num_nodes(self, chances: Sequence[Sequence[float]]) -> int:
        """Nodes of a row, the root left out, given each row's chances from the best down."""
        most = min(self.size, max(map(len, chances)))
        if self.pace is None:
            return most
        count = self._count(self.pace, chances, most)
        self._promised = sum(sum(row[:count]) for row in chances) / len(chances)
        return count

    def _count(self, pace: Pace, chances: Sequence[Sequence[float]], most: int) -> int:
        """What brings most, or what must be tried again."""
        if self._plain.take():
            return 0
        most = most if pace.most is None else min(most, pace.most)
        best = self._best(pace, chances, most)
        return min(most, 2 * best + 1) if self._more.take(can=most > 0) else best

    def _best(self, pace: Pace, chances: Sequence[Sequence[float]], most: int) -> int:
        """The number of nodes that brings most."""
        rate, rows, trust = pace.tokens_a_second, len(chances), self.trust
        brings, count = 1.0, 0
        best = brings - rate * pace.seconds(rows)
        for nodes in range(1, most + 1):
            brings += trust * sum(row[nodes - 1] for row in chances if len(row) >= nodes) / rows
            ahead = brings - rate * pace.seconds(rows * (nodes + 1))
            if ahead > best:
                best, count = ahead, nodes
        return count

    def saw(self, num_nodes: int, lap: Lap) -> None:
        """The last step verified so many nodes, roots included."""
        if self.pace is None:
            return
        self.pace.saw(num_nodes, lap.seconds, lap.tokens, guesses=self._promised > 0)
        if self._promised:
            self._kept += SLOWLY * (lap.tokens - 1 - self._kept)
            self._hoped += SLOWLY * (self._promised - self._hoped)
        else:  # no news: what was lost of trust comes back in time, and is tried again
            self._kept += SLOWLY * FORGIVEN * (self._hoped - self._kept)


class _Turn:
    """When something is to be done again: after `first` steps, then after twice as many each time, up to `every`."""

    def __init__(self, first: int, every: int, *, left: int) -> None:
        self._wait, self._every = first, every
        self._left = left

    @property
    def due(self) -> bool:
        """Whether it is to be done at the next step that can."""
        return self._left <= 0

    def take(self, can: bool = True) -> bool:
        """A step more: whether it is done now."""
        if self._left > 0 or not can:
            self._left -= 1
            return False
        self._left = self._wait - 1
        self._wait = min(self._every, 2 * self._wait)
        return True


class GatheredDrafter(SharedMemory):
    """Asks every source, and drafts the likeliest guesses that the budget pays for."""

    def __init__(
        self,
        sources: Sequence[Source],
        budget: Budget,
        name: str = "mixed",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(sources)
        self.name = name
        self.sources = sources
        self.budget = budget
        self.size = budget.size
        self.lap_times = LapTimes()
        self._laps = Laps(clock)
        self._asking = Sources(sources, clock)
        self._num_nodes = 0  # that the last step verified

    def join(self, first_row: int, prompts: Sequence[Sequence[int]], taps_BTLH: Tensor | None) -> None:
        """Rows are other ones than before."""
        self._restart()
        super().join(first_row, prompts, taps_BTLH)

    def drop(self, row: int) -> None:
        """As when rows join."""
        self._restart()
        super().drop(row)

    def _restart(self) -> None:
        self._laps.restart()
        self._asking.forget()

    @torch.inference_mode()
    def propose(self, context: Context) -> Draft:
        """One tree for each row; the root alone where nothing is likely enough. Reads guesses on the host."""
        if lap := self._laps.lap(context):
            self.budget.saw(self._num_nodes, lap)
            self.lap_times.add(self._num_nodes, lap)
        tries = [Trie(tokens[-1]) for tokens in context.tokens]
        floor = self.budget.floor(len(tries))
        pace = self.budget.pace
        self._asking.ask(context, tries, floor, pace.tokens_a_second if pace else None)
        likeliest = [trie.likeliest(self.size) for trie in tries]
        chances = [[trie.chances[node] for node in nodes] for trie, nodes in zip(tries, likeliest, strict=True)]
        count = self.budget.num_nodes(chances)
        self._num_nodes = len(tries) * (count + 1)
        picked = [Picked(trie, nodes[:count]) for trie, nodes in zip(tries, likeliest, strict=True)]
        return draft_of(picked, context.root_B.device)
