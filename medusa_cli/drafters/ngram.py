"""Guesses copied from the text itself: what followed the last few tokens when they stood there before.

Prompt lookup decoding (transformers' prompt_lookup_num_tokens), with as many continuations as pay instead of one, and
with a belief in each that is learnt while decoding: how often a copied token was right, by the length of the match and
the depth. Costs no forward, and finds long copies in summaries, code edits and retrieved text.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate, takewhile
from operator import mul

from torch import Tensor

from medusa_cli.contracts import Context
from medusa_cli.drafters.memory import NoMemory
from medusa_cli.drafters.trie import Trie

LONGEST = 4  # tokens of a match: longer ones are hardly surer
DEPTH = 10  # tokens copied after a match
DEEP = 3  # copies that were right so far are as sure below this depth as at it
KEPT = 4  # the latest places of an n-gram that are remembered
# Right and wrong copies a belief starts with, for a match of 1, 2, ... tokens.
_BEFORE = ((1.0, 5.0), (2.0, 3.0), (3.0, 1.5), (4.0, 1.0))


class Index:
    """Where each n-gram of one text ends."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._ends: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(LONGEST)]

    def read(self, tokens: Sequence[int]) -> None:
        """The text has grown to these tokens; the n-gram at its very end is left out: nothing follows it yet."""
        start = len(self.tokens)
        self.tokens.extend(tokens[start:])
        for end in range(max(1, start), len(self.tokens)):
            for length in range(1, min(LONGEST, end) + 1):
                places = self._ends[length - 1].setdefault(tuple(self.tokens[end - length : end]), [])
                places.append(end)
                del places[:-KEPT]

    def continuations(self) -> list[tuple[int, list[int]]]:
        """(length of the match, the tokens that followed) for each place, the longest match and the latest first."""
        found: dict[int, int] = {}
        for length in range(min(LONGEST, len(self.tokens)), 0, -1):
            for end in reversed(self._ends[length - 1].get(tuple(self.tokens[-length:]), [])):
                found.setdefault(end, length)
        return [(length, self._copy(end)) for end, length in found.items()]

    def _copy(self, start: int) -> list[int]:
        """The tokens from a place on; past the text's end the copy goes on with itself, as a loop would."""
        copied = self.tokens[start : start + DEPTH]
        period = len(self.tokens) - start
        while len(copied) < DEPTH:
            copied.append(copied[-period])
        return copied


class Belief:
    """How often a token copied at a depth was right after those before it were, by the length of the match."""

    def __init__(self) -> None:
        self._right: dict[tuple[int, int], float] = defaultdict(float)
        self._asked: dict[tuple[int, int], float] = defaultdict(float)

    def chance(self, length: int, depth: int) -> float:
        """That the copied token of this depth (from 0) is right, given those before it. Long copies grow surer."""
        right, wrong = _BEFORE[length - 1]
        key = length, min(depth, DEEP)
        return (self._right[key] + right) / (self._asked[key] + right + wrong)

    def chances(self, length: int, depth: int) -> Iterator[float]:
        """That a copy of so many tokens is right up to each of them."""
        return accumulate((self.chance(length, place) for place in range(depth)), mul)

    def learn(self, length: int, copied: Sequence[int], came: Sequence[int]) -> None:
        """What came, where `copied` had been guessed."""
        for depth, (guess, token) in enumerate(zip(copied, came, strict=False)):
            key = length, min(depth, DEEP)
            self._asked[key] += 1
            if guess != token:
                return
            self._right[key] += 1


class Ngrams(NoMemory):
    """The source of guesses: one index for each row, one belief for the run."""

    @classmethod
    def of(cls, target: object, wishes: object) -> "Ngrams":
        """As every source is made; it needs to know neither."""
        return cls()

    def __init__(self) -> None:
        self._belief = Belief()
        self._indices: list[Index] = []
        self._offered: list[list[tuple[int, list[int]]]] = []

    def join(self, first_row: int, prompts: Sequence[Sequence[int]], taps_BTLH: Tensor | None) -> None:
        """New texts; they are read when guesses are wanted."""
        rows = slice(first_row, first_row + len(prompts))
        self._indices[rows] = [Index() for _ in prompts]
        self._offered[rows] = [[] for _ in prompts]

    def move(self, source: int, row: int) -> None:
        """The index goes with its text."""
        self._indices[row], self._offered[row] = self._indices[source], self._offered[source]

    def add_guesses(self, context: Context, tries: Sequence[Trie], floor: float) -> None:
        """The continuations of each row's last tokens, each with the chance that it is right so far."""
        for row, (tokens, trie) in enumerate(zip(context.tokens, tries, strict=True)):
            index = self._indices[row]
            for length, copied in self._offered[row]:
                self._belief.learn(length, copied, tokens[len(index.tokens) :])
            index.read(tokens)
            self._offered[row] = index.continuations()
            for length, copied in self._offered[row]:
                chances = takewhile(lambda chance: chance >= floor, self._belief.chances(length, len(copied)))
                trie.add_path(copied, chances)
