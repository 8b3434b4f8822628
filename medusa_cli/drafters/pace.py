"""What steps cost and bring here: measured once, corrected by every step since. Budgets decide by it.

It knows no model and no draft, and is told the time.
"""

from collections.abc import Mapping, Sequence

RECENT = 0.1  # weight of the latest step in what a step of its size costs
SLOWLY = 0.02  # and in how fast the text grows
OUTLIER = 3.0  # a step that took more than this many times its cost was interrupted; that says nothing


class Pace:
    """Seconds of a step by the nodes it verifies, and tokens a second so far.

    first_N holds the seconds measured beforehand, by nodes of all rows together, roots included. Sizes between those
    measured lie on a line, and every step seen moves all sizes a little: the machine may be busier than it was.
    """

    def __init__(self, first_N: Mapping[int, float]) -> None:
        self._first = sorted(first_N.items())
        self._seen: dict[int, float] = {}
        self._drift = 1.0
        self._tokens, self._seconds = 1.0, self.seconds(1)

    @property
    def tokens_a_second(self) -> float:
        """Of a row, lately."""
        return self._tokens / self._seconds

    def seconds(self, nodes: int) -> float:
        """What a step of so many nodes costs, as far as is known."""
        return self._seen.get(nodes) or self._drift * _between(self._first, nodes)

    def saw(self, nodes: int, seconds: float, tokens: float) -> None:
        """A step over so many nodes took so long and brought each row so many tokens."""
        expected = self.seconds(nodes)
        seconds = min(seconds, OUTLIER * expected)
        self._seen[nodes] = expected + RECENT * (seconds - expected)
        self._drift += RECENT * (seconds / _between(self._first, nodes) - self._drift)
        self._tokens += SLOWLY * (tokens - self._tokens)
        self._seconds += SLOWLY * (seconds - self._seconds)


def _between(known: Sequence[tuple[int, float]], nodes: int) -> float:
    """Seconds for this many nodes: on the line between the sizes measured, or on the last line beyond them."""
    for (low, below), (high, above) in zip(known, known[1:], strict=False):
        if nodes <= high:
            return below + (above - below) * (nodes - low) / (high - low)
    (low, below), (high, above) = known[-2:] if len(known) > 1 else (known[0], known[0])
    return above + ((above - below) / (high - low) * (nodes - high) if high > low else 0.0)
