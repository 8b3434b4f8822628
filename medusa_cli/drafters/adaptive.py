"""A drafter that is let go on only while it pays: its tokens a second against those of plain steps, both as seen here.

It knows neither model nor heads: it sees when it is asked, and how far the texts have grown by then.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from medusa_cli.contracts import Context, Draft, Drafter
from medusa_cli.drafters.memory import InnerMemory
from medusa_cli.drafters.step_costs import Lap, Laps
from medusa_cli.trees.tree import TokenTree

PLAIN_EVERY, PLAIN_STEPS = 48, 2  # while guessing pays, so many plain steps after so many others say what these cost
TRIAL = 24  # steps with guesses before they are judged, and after each rest
LOSS = 0.97  # of the speed of plain steps: what is as good as equal is no reason to stop, speeds are noisy
REST, LONGEST_REST = 64, 1024  # plain steps after guesses did not pay; twice as many each time
WEIGHT = 0.02  # of the latest step in a speed: a step brings one token or five, and a mean must tell 1.3 from 1.4
OUTLIER = 4.0  # a step that took so many times the usual was interrupted


@dataclass
class Speed:
    """Running means of seconds and tokens of a row, of steps of one kind."""

    seconds: float = 0.0
    tokens: float = 0.0
    count: int = 0

    def add(self, lap: Lap) -> None:
        """A step more."""
        self.count += 1
        weight = max(WEIGHT, 1 / self.count)
        seconds = min(lap.seconds, OUTLIER * self.seconds) if self.count > 1 else lap.seconds
        self.seconds += weight * (seconds - self.seconds)
        self.tokens += weight * (lap.tokens - self.tokens)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0


class WatchedDrafter(InnerMemory):
    """Passes on what `drafter` guesses while that pays, and guesses nothing for a while when it does not."""

    def __init__(self, drafter: Drafter, clock: Callable[[], float] = time.perf_counter) -> None:
        self.inner = drafter
        self.name = drafter.name
        self.size = drafter.size
        self.guessing, self.plain = Speed(), Speed()
        self._laps = Laps(clock)
        self._empty = TokenTree.empty()
        self._guessed = False  # whether the last step was one with guesses
        self._in_a_row = 0  # steps since the last change between guessing and plain steps
        self._plain_left = 0
        self._rest = REST

    def join(self, first_row: int, prompts: Sequence[Sequence[int]], taps_BTLH: Tensor | None) -> None:
        """Rows are other ones than before; what speeds were seen stays."""
        self._laps.restart()
        super().join(first_row, prompts, taps_BTLH)

    def drop(self, row: int) -> None:
        """As when rows join."""
        self._laps.restart()
        super().drop(row)

    def propose(self, context: Context) -> Draft:
        """The drafter's guesses, or the roots alone."""
        if lap := self._laps.lap(context):
            (self.guessing if self._guessed else self.plain).add(lap)
        self._guessed = self._decide()
        if self._guessed:
            return self.inner.propose(context)
        return Draft(context.root_B[:, None], self._empty.to(context.root_B.device))

    def _decide(self) -> bool:
        """Whether the next step is one with guesses."""
        if self._plain_left:
            self._plain_left -= 1
            return False
        self._in_a_row += 1
        if self._in_a_row % TRIAL == 0 and self.plain.count and self.guessing.rate < LOSS * self.plain.rate:
            self._plain_left, self._in_a_row = self._rest - 1, 0
            self._rest = min(LONGEST_REST, 2 * self._rest)
            return False
        if self._in_a_row >= PLAIN_EVERY or (self._in_a_row == TRIAL and not self.plain.count):
            self._plain_left, self._in_a_row, self._rest = PLAIN_STEPS - 1, 0, REST
            return False
        return True
