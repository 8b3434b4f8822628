"""Which sources of guesses are asked: one that isn't worth its time rests, and is tried again.

At R tokens a second, s seconds spent on guessing must bring more than R * s tokens: so many are lost meanwhile. A guess
that several make is to the credit of the first.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence

from medusa_cli.contracts import Context
from medusa_cli.drafters.source import Source
from medusa_cli.drafters.trie import ROOT, Trie

FIRST = 6  # times that a source is asked before anything is decided
REST_FIRST, REST_MOST = 8, 256  # steps until it is tried again: twice as many after every try that is no better
AGAIN = 3  # times that it is asked then
SLOWLY = 0.1  # weight of the latest step


class Worth:
    """What one source takes and brings."""

    def __init__(self) -> None:
        self._seconds = self._tokens = 0.0
        self._asked = 0
        self._trial = FIRST
        self._rest = 0
        self._next_rest = REST_FIRST

    def is_due(self, tokens_a_second: float) -> bool:
        """Whether to ask it now. Called once a step."""
        if self._rest:
            self._rest -= 1
            return False
        if self._trial:
            return True
        if self._tokens > tokens_a_second * self._seconds:
            self._next_rest = REST_FIRST
            return True
        self._rest, self._trial, self._asked = self._next_rest - 1, AGAIN, 0  # what it was like before is forgotten
        self._next_rest = min(REST_MOST, 2 * self._next_rest)
        return False

    def took(self, seconds: float) -> None:
        """It guessed for so long."""
        self._asked += 1
        self._trial = max(0, self._trial - 1)
        self._seconds += max(SLOWLY, 1 / self._asked) * (seconds - self._seconds)

    def brought(self, tokens: float) -> None:
        """Of its latest guesses so many were right, a row, that nobody asked before it had made."""
        self._tokens += max(SLOWLY, 1 / self._asked) * (tokens - self._tokens)


class Sources:
    """Several sources, asked in order as far as they are worth it."""

    def __init__(self, sources: Sequence[Source], clock: Callable[[], float]) -> None:
        self._judged = [(source, Worth()) for source in sources]
        self._clock = clock
        self.forget()

    def forget(self) -> None:
        """Rows are other ones: what was guessed for others says nothing of them."""
        self._asked: list[Worth] = []
        self._made: list[tuple[int, Trie, list[int]]] = []  # each row's length, its trie, its nodes after each source

    def ask(self, context: Context, tries: Sequence[Trie], floor: float, tokens_a_second: float | None) -> None:
        """Fill the tries; at no known pace every source is asked."""
        self._learn(context.tokens)
        self._made = [(len(tokens), trie, []) for tokens, trie in zip(context.tokens, tries, strict=True)]
        for source, worth in self._judged:
            if tokens_a_second is not None and not worth.is_due(tokens_a_second):
                continue
            begun = self._clock()
            source.add_guesses(context, tries, floor)
            worth.took(self._clock() - begun)
            self._asked.append(worth)
            for _, trie, ends in self._made:
                ends.append(len(trie.tokens))

    def _learn(self, texts: Sequence[Sequence[int]]) -> None:
        """Give each source that was asked the credit for what became text."""
        if self._made and len(self._made) == len(texts):
            right = [0] * len(self._asked)
            for (length, trie, ends), tokens in zip(self._made, texts, strict=True):
                for node in _nodes_of(trie, tokens[length:-1]):  # the last token was decided by the target itself
                    right[bisect_right(ends, node)] += 1
            for worth, count in zip(self._asked, right, strict=True):
                worth.brought(count / len(texts))
        self.forget()


def _nodes_of(trie: Trie, tokens: Sequence[int]) -> list[int]:
    """The nodes of a path that the trie has."""
    nodes, node = [], ROOT
    for token in tokens:
        found = trie.child(node, token)
        if found is None:
            break
        nodes.append(node := found)
    return nodes
