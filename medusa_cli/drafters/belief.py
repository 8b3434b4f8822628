"""How far copies are believed: by how many tokens before them are the same, and learnt from those that came true."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import mul

LENGTHS = (1, 2, 3, 4, 6, 9, 14, 22)  # matches up to each of these are believed alike; longer ones as the last
DEEP = 3  # copies that were right so far are as sure below this depth as at it
# Right and wrong copies a belief starts with, by the length of the match as above.
_BEFORE = ((1.0, 5.0), (2.0, 3.0), (3.0, 1.5), (4.0, 1.0), (5.0, 0.8), (6.0, 0.6), (8.0, 0.5), (10.0, 0.4))


class Belief:
    """How often a token copied at a depth was right after those before it were, by the length of the match."""

    def __init__(self) -> None:
        self._right: dict[tuple[int, int], float] = defaultdict(float)
        self._asked: dict[tuple[int, int], float] = defaultdict(float)

    def chance(self, length: int, depth: int) -> float:
        """That the copied token of this depth (from 0) is right, given those before it. Long copies grow surer."""
        key = _key(length, depth)
        right, wrong = _BEFORE[key[0]]
        return (self._right[key] + right) / (self._asked[key] + right + wrong)

    def chances(self, length: int, depth: int) -> Iterator[float]:
        """That a copy of so many tokens is right up to each of them."""
        return accumulate((self.chance(length, place) for place in range(depth)), mul)

    def learn(self, length: int, copied: Sequence[int], came: Sequence[int]) -> None:
        """What came, where `copied` had been guessed."""
        for depth, (guess, token) in enumerate(zip(copied, came, strict=False)):
            key = _key(length, depth)
            self._asked[key] += 1
            if guess != token:
                return
            self._right[key] += 1


def _key(length: int, depth: int) -> tuple[int, int]:
    grade = next((grade for grade, most in enumerate(LENGTHS) if length <= most), len(LENGTHS) - 1)
    return grade, min(depth, DEEP)
