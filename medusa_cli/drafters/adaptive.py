"""A drafter that is let go on only while it pays: its tokens a second against those of plain steps, both as seen here.

It knows neither model nor heads: it sees when it is asked, and how far the texts have grown by then.
"""

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from medusa_cli.contracts import Context, Draft, Drafter
from medusa_cli.drafters.memory import InnerMemory
from medusa_cli.drafters.purse import Purse
from medusa_cli.drafters.step_costs import Laps, Pace
from medusa_cli.drafters.worth import AT_FIRST, Worth
from medusa_cli.trees.tree import TokenTree


class WatchedDrafter(InnerMemory):
    """Passes on what `drafter` guesses while that pays, and guesses nothing for a while when it does not."""

    def __init__(self, drafter: Drafter, clock: Callable[[], float] = time.perf_counter) -> None:
        self.inner = drafter
        self.name = drafter.name
        self.size = drafter.size
        self.purse = Purse(Pace({1: 1.0}))  # all that it knows of costs is what it sees
        self._worth = Worth()
        self._laps = Laps(clock)
        self._empty = TokenTree.empty()
        self._num_nodes = self._rows = 0  # of each row, that the last step verified, and rows
        self._guessed = 0  # and the last one with guesses
        self._on_trial = False

    def join(self, first_row: int, prompts: Sequence[Sequence[int]], taps_BTLH: Tensor | None) -> None:
        """Rows are other ones than before; what was seen stays."""
        self._restart()
        self.purse.begin(alone=first_row == 0)
        super().join(first_row, prompts, taps_BTLH)

    def drop(self, row: int) -> None:
        """As when rows join."""
        self._restart()
        super().drop(row)

    def _restart(self) -> None:
        if self._laps.restart():
            self.purse.missed(self._rows * self._num_nodes, self._rows, 0.0, trial=self._on_trial)

    def propose(self, context: Context) -> Draft:
        """The drafter's guesses, or the roots alone."""
        self._learn(context)
        if self._may(len(context.tokens)):
            draft = self.inner.propose(context)
        else:
            draft = Draft(context.root_B[:, None], self._empty.to(context.root_B.device))
        self._num_nodes, self._rows = draft.tree.num_nodes, len(context.tokens)
        return draft

    def _learn(self, context: Context) -> None:
        """What the last step took and brought."""
        lap, rows = self._laps.lap(context), len(context.tokens)
        if lap is None:
            return
        guessed = self._num_nodes > 1
        self.purse.saw(rows * self._num_nodes, rows, lap, guesses=guessed, trial=guessed and self._on_trial)
        if guessed:
            self._guessed = self._num_nodes
            plain = self.purse.pace.seconds(rows)
            self._worth.took(lap.seconds - plain, plain)
            self._worth.brought(lap.tokens - 1)

    def _may(self, rows: int) -> bool:
        """Whether the next step is one with guesses."""
        pace = self.purse.pace
        self._on_trial = self._worth.on_trial
        nodes = rows * (self._guessed or 1 + self.size)
        asking = 0.0 if pace.knows(nodes) else AT_FIRST * pace.seconds(rows)
        return (
            not self.purse.must_look(rows)
            and self.purse.allows(asking, rows, nodes, trial=self._on_trial)
            and self._worth.is_due(1 / pace.seconds(rows))
        )
