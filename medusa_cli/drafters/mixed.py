"""A drafter of guesses that are gathered on the host, from one source or several, under one budget of nodes.

`suffix` is this with one source; `mixed` adds the heads. Whoever can guess tokens can be a source.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from medusa_cli.contracts import Context, Draft, Drafter
from medusa_cli.drafters.memory import SharedMemory
from medusa_cli.drafters.purse import Purse, Turn
from medusa_cli.drafters.source import Source
from medusa_cli.drafters.step_costs import Lap, Laps, LapTimes, Pace
from medusa_cli.drafters.trie import Picked, Trie, draft_of
from medusa_cli.drafters.worth import Sources
from medusa_cli.trees.tree import TokenTree

TRY_FIRST, TRY_EVERY = 4, 128  # steps between tries of more guesses than seem to pay: soon at first, then rarely
SLOWLY = 0.02  # weight of the latest step in how far chances are trusted
BELIEF = 8  # steps that a chance is trusted like before the first
FORGIVEN = 0.02  # of that, in a step without guesses
LEAST_TRUST = 0.05  # guesses that are all wrong are still made where they are surest
QUICKER = 0.8  # than is believed: a try that took less is soon followed by the next
DOUBT = 0.5  # of what a node costs on average where it costs least: the last of them may cost less


class HeadsDrafter(Drafter, Source, Protocol):
    """Heads in a shape draft by themselves, and are a source among others."""


class Budget:
    """How many nodes pay: at most `size`, and no more than their chances are worth at this machine's pace.

    n guesses under each root bring 1 token and their chances summed, and take the seconds of a step of that size. At R
    tokens a second so far, the n is taken that is most tokens ahead of R: what the step brings, less R times what it
    takes. Chances are trusted as far as they came true lately. Without a pace, `size` nodes are always taken.

    What is never tried can't be learnt. So now and then about twice as many guesses are made as seem to pay: a table
    that calls them dear is found out. The purse says when a step must be plain, and what may be lost.
    """

    def __init__(self, size: int, pace: Pace | None = None) -> None:
        self.size = size
        self.purse = Purse(pace) if pace else None
        self._kept = self._hoped = 1.0  # guesses a step, and the chances they were given
        self._promised = 0.0
        self._judged = BELIEF
        self._most_paid = 0
        self._looks = self._on_trial = False
        self._more = Turn(TRY_FIRST, TRY_EVERY, left=TRY_FIRST)

    @property
    def pace(self) -> Pace | None:
        """What steps cost."""
        return self.purse.pace if self.purse else None

    @property
    def trust(self) -> float:
        """What a chance has been worth."""
        return self._kept / self._hoped

    def is_plain(self, num_rows: int) -> bool:
        """Whether the next step must be plain: then nobody needs to guess. Asked once a step, before all else."""
        self._promised, self._on_trial = 0.0, False
        self._looks = self.purse is not None and self.purse.must_look(num_rows)
        return self._looks

    def floor(self, num_rows: int) -> float:
        """A chance that pays for no node: sources needn't look for guesses below it."""
        if self.pace is None or not self.size or self._more.due:
            return 0.0
        plain = self.pace.seconds(num_rows)
        cost = min((self.pace.seconds(num_rows * (n + 1)) - plain) / n for n in range(1, self.size + 1))
        return max(0.0, DOUBT * self.pace.tokens_a_second * cost / max(self.trust, LEAST_TRUST))

    def num_nodes(self, chances: Sequence[Sequence[float]], asked: float = 0.0, *, trial: bool = False) -> int:
        """Nodes of a row, the root left out, given each row's chances from the best down.

        asked   seconds that it took to find them
        trial   whether who found them is to be judged yet
        """
        most = min(self.size, max(map(len, chances)))
        if self.purse is None:
            return most
        count = self._count(self.purse.pace, chances, most)
        self._on_trial = self._on_trial or trial
        rows = len(chances)
        while count and not self.purse.allows(asked, rows, rows * (count + 1), trial=self._on_trial):
            count -= 1
        self._promised = sum(sum(row[:count]) for row in chances) / len(chances)
        return count

    def _count(self, pace: Pace, chances: Sequence[Sequence[float]], most: int) -> int:
        """What brings most, or what must be tried again."""
        trusted = self.size if pace.most is None else pace.most
        self._on_trial = trusted < self.size
        most = min(most, trusted)
        best = self._best(pace, chances, most)
        if best > self._most_paid:  # what was found to pay is not the end of it
            self._most_paid, self._more = best, Turn(TRY_FIRST, TRY_EVERY, left=TRY_FIRST)
        if not self._more.take(can=most > 0):
            return best
        self._on_trial = True
        return min(most, 2 * best + 1)

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

    def missed(self, num_nodes: int, num_rows: int, asked: float) -> None:
        """Nobody saw the end of the last step, since rows came or went."""
        if self.purse is not None:
            self.purse.missed(num_nodes, num_rows, asked, trial=self._on_trial)

    def saw(self, num_nodes: int, num_rows: int, lap: Lap) -> None:
        """The last step verified so many nodes, roots included."""
        if self.purse is None:
            return
        if self._on_trial and lap.verified < QUICKER * self.purse.pace.seconds(num_nodes):
            self._more = Turn(TRY_FIRST, TRY_EVERY, left=TRY_FIRST)
        self.purse.saw(num_nodes, num_rows, lap, guesses=self._promised > 0, trial=self._on_trial)
        if self._promised:
            self._judged += 1
            weight = max(SLOWLY, 1 / self._judged)
            self._kept += weight * (lap.tokens - 1 - self._kept)
            self._hoped += weight * (self._promised - self._hoped)
        else:  # no news: what was lost of trust comes back in time, and is tried again
            self._kept += SLOWLY * FORGIVEN * (self._hoped - self._kept)


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
        self._num_nodes = self._rows = 0  # that the last step verified, and rows
        self._empty = TokenTree.empty()

    def join(self, first_row: int, prompts: Sequence[Sequence[int]], taps_BTLH: Tensor | None) -> None:
        """Rows are other ones than before."""
        self._restart()
        if self.budget.purse is not None:
            self.budget.purse.begin(alone=first_row == 0)
        super().join(first_row, prompts, taps_BTLH)

    def drop(self, row: int) -> None:
        """As when rows join."""
        self._restart()
        super().drop(row)

    def _restart(self) -> None:
        if self._laps.restart():
            self.budget.missed(self._num_nodes, self._rows, self._asking.seconds)
        self._asking.forget()

    @torch.inference_mode()
    def propose(self, context: Context) -> Draft:
        """One tree for each row; the root alone where nothing is likely enough. Reads guesses on the host."""
        if lap := self._laps.lap(context):
            lap = replace(lap, asked=self._asking.seconds)
            self.budget.saw(self._num_nodes, len(context.tokens), lap)
            self.lap_times.add(self._num_nodes, lap)
        tries = [Trie(tokens[-1]) for tokens in context.tokens]
        if not self.budget.is_plain(len(tries)):
            self._asking.ask(context, tries, self.budget.floor(len(tries)), self.budget.purse, self.size)
        else:
            self._asking.rest(context)
        likeliest = [trie.likeliest(self.size) for trie in tries]
        chances = [[trie.chances[node] for node in nodes] for trie, nodes in zip(tries, likeliest, strict=True)]
        count = self.budget.num_nodes(chances, self._asking.seconds, trial=self._asking.on_trial)
        self._num_nodes, self._rows = len(tries) * (count + 1), len(tries)
        if not count:
            return Draft(context.root_B[:, None], self._empty.to(context.root_B.device))
        picked = [Picked(trie, nodes[:count]) for trie, nodes in zip(tries, likeliest, strict=True)]
        return draft_of(picked, context.root_B.device)
