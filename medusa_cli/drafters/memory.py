"""Memory of drafters: the empty rest for those that have none, and what wrappers pass on.

Shape letters: B rows, D places on a path, L tapped layers, T positions, H hidden.
"""

from collections.abc import Sequence

from torch import Tensor

from medusa_cli.contracts import Context, Drafter, Memory


class NoMemory:
    """For drafters and sources that look at the context alone."""

    taps: tuple[int, ...] = ()

    def join(self, first_row: int, prompts: Sequence[Sequence[int]], taps_BTLH: Tensor | None) -> None:
        """Nothing is remembered."""

    def keep(self, context: Context, taps_BDLH: Tensor | None) -> None:
        """Nothing is remembered."""

    def move(self, source: int, row: int) -> None:
        """Nothing is remembered."""

    def drop(self, row: int) -> None:
        """Nothing is remembered."""


class InnerMemory:
    """For wrappers of one drafter."""

    inner: Drafter

    @property
    def taps(self) -> tuple[int, ...]:
        """The inner drafter's."""
        return self.inner.taps

    def join(self, first_row: int, prompts: Sequence[Sequence[int]], taps_BTLH: Tensor | None) -> None:
        """To the inner drafter."""
        self.inner.join(first_row, prompts, taps_BTLH)

    def keep(self, context: Context, taps_BDLH: Tensor | None) -> None:
        """To the inner drafter, also after steps without its guesses."""
        self.inner.keep(context, taps_BDLH)

    def move(self, source: int, row: int) -> None:
        """To the inner drafter."""
        self.inner.move(source, row)

    def drop(self, row: int) -> None:
        """To the inner drafter."""
        self.inner.drop(row)


class SharedMemory:
    """For wrappers of several parts: each is shown the layers that it wants."""

    def __init__(self, parts: Sequence[Memory]) -> None:
        self._parts = parts
        self.taps = tuple(dict.fromkeys(tap for part in parts for tap in part.taps))

    def join(self, first_row: int, prompts: Sequence[Sequence[int]], taps_BTLH: Tensor | None) -> None:
        """To each part."""
        for part in self._parts:
            part.join(first_row, prompts, self._of(part, taps_BTLH))

    def keep(self, context: Context, taps_BDLH: Tensor | None) -> None:
        """To each part."""
        for part in self._parts:
            part.keep(context, self._of(part, taps_BDLH))

    def move(self, source: int, row: int) -> None:
        """To each part."""
        for part in self._parts:
            part.move(source, row)

    def drop(self, row: int) -> None:
        """To each part."""
        for part in self._parts:
            part.drop(row)

    def _of(self, part: Memory, taps_BTLH: Tensor | None) -> Tensor | None:
        """The layers of one part."""
        if taps_BTLH is None or part.taps == self.taps:
            return taps_BTLH
        return taps_BTLH[:, :, [self.taps.index(tap) for tap in part.taps]] if part.taps else None
