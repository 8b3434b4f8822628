"""Admission: which texts get a row next. First come, first served, as far as rows and cache columns reach.

All rows of a cache have as many columns as the longest text in them needs, so what is counted is a rectangle.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from medusa_cli.decode.rows import Limits, Row
from medusa_cli.errors import DataError
from medusa_cli.model.cache import TreeCache
from medusa_cli.model.target import Target


@dataclass(frozen=True)
class Room:
    """What a cache may come to hold.

    max_rows     texts side by side
    columns_of   tokens that a text may grow to, to the columns that a row needs for them with a tree under it
    columns      that there is memory for, over all rows; None: nobody set a bound
    """

    max_rows: int
    columns_of: Callable[[int], int]
    columns: int | None

    def taken_by(self, rows: Sequence[Row]) -> int:
        """Columns set aside for these texts, whatever they use of them by now."""
        return len(rows) * self.longest(rows)

    def longest(self, rows: Sequence[Row]) -> int:
        """Columns of each row beside these texts."""
        return max((self.columns_of(row.most_tokens) for row in rows), default=0)

    def fits(self, rows: Sequence[Row]) -> bool:
        """Whether these texts can be written side by side."""
        return len(rows) <= self.max_rows and (self.columns is None or self.taken_by(rows) <= self.columns)

    def num_rows(self, rows: Sequence[Row]) -> int:
        """As many as there is memory for while these texts are among them."""
        return self.max_rows if self.columns is None else min(self.max_rows, self.columns // self.longest(rows))

    def make_in(self, cache: TreeCache, rows: Sequence[Row]) -> None:
        """Give the cache another shape where it hasn't rows for these texts, or what they may need is too much."""
        if self.columns is None:
            return
        capacity, longest = cache.layers[0].capacity, self.longest(rows)
        if cache.num_rows < len(rows) or cache.num_rows * max(capacity, longest) > self.columns:
            cache.reshape(self.num_rows(rows), min(capacity, longest))


class Queue:
    """Texts that wait. None overtakes another: a long text behind which short ones wait gets its turn."""

    def __init__(self, room: Room) -> None:
        self.rows: deque[Row] = deque()
        self._room = room

    def check(self, row: Row, name: str = "the prompt") -> None:
        """Raise DataError, with the numbers, for a text that could never be written, alone neither."""
        if not self._room.fits([row]):
            raise DataError(
                f"{name} and its text may grow to {row.most_tokens:,} tokens, which need {self._room.longest([row]):,} "
                f"columns of the cache; there is memory for {self._room.columns:,}",
                "shorten the prompt, or ask for fewer tokens",
            )

    def take(self, beside: Sequence[Row]) -> list[Row]:
        """The next texts, as many as fit beside those that have rows."""
        taken: list[Row] = []
        while self.rows and self._room.fits([*beside, *taken, self.rows[0]]):
            taken.append(self.rows.popleft())
        return taken

    def remove(self, key: int) -> None:
        """One wants to wait no more."""
        self.rows = deque(row for row in self.rows if row.key != key)


def check_prompt(target: Target, prompt: Sequence[int], limits: Limits, name: str) -> None:
    """Raise DataError, calling it `name`, for a prompt that is empty or leaves no room in the context.

    Raises TargetError for one with a token that the target has no embedding for.
    """
    if not prompt:
        raise DataError(f"{name} is empty", "give at least one token; a base model needs some text to go on")
    if limits.budget(len(prompt)) < 1:
        raise DataError(
            f"{name} has {len(prompt)} tokens; the model's context holds {limits.context_limit}",
            "shorten the prompt: at least one position must be left to write to",
        )
    target.check_ids([prompt])
