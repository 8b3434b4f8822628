"""Whether whoever guesses is worth its time: one that isn't rests, and is tried again, as far as the purse allows.

At R tokens a second, s seconds spent on guessing must bring more than R * s tokens: so many are lost meanwhile. A guess
that several make is to the credit of the first.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from medusa_cli.contracts import Context
from medusa_cli.drafters.purse import INTERRUPTED, Purse
from medusa_cli.drafters.source import Source, price_of
from medusa_cli.drafters.trie import ROOT, Trie

FIRST = 16  # times that one is asked before it is judged
REST_FIRST, REST_MOST = 8, 1024  # steps until it is tried again: twice as many after every try that is no better
AGAIN = 6  # times that it is asked then
SLOWLY = 0.04  # weight of the latest step
CHEAP = 0.2  # plain steps that guessing takes, for which one node is enough
FEW = 3  # nodes of a row that must be affordable else: guesses that can't be verified are lost
AT_FIRST = 0.1  # plain steps that guessing may take, before that is known


class Worth:
    """What one who guesses takes and brings, beside a plain step."""

    def __init__(self) -> None:
        self._seconds = self._tokens = 0.0
        self._asked = 0
        self._ever = False
        self._trial = FIRST
        self._rest = 0
        self._next_rest = REST_FIRST

    @property
    def on_trial(self) -> bool:
        """Whether it is to be judged yet."""
        return self._trial > 0

    def usual(self, plain: float) -> float | None:
        """Plain steps that it takes, where one takes so many seconds; None until that is known."""
        return self._seconds / plain if self._ever else None

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
        self._rest, self._trial, self._asked = self._next_rest - 1, AGAIN, min(self._asked, AGAIN)
        self._next_rest = min(REST_MOST, 2 * self._next_rest)
        return False

    def took(self, seconds: float, plain: float) -> None:
        """It took so much longer than a plain step, which takes so long."""
        if self._ever:
            seconds = min(seconds, INTERRUPTED * plain)
        self._ever = True
        self._asked += 1
        self._trial = max(0, self._trial - 1)
        self._seconds += max(SLOWLY, 1 / self._asked) * (seconds - self._seconds)

    def brought(self, tokens: float) -> None:
        """Of its latest guesses so many were right, a row, that nobody asked before it had made."""
        self._tokens += max(SLOWLY, 1 / self._asked) * (tokens - self._tokens)


@dataclass(frozen=True)
class _Rows:
    """How many texts there are, and nodes of each that may be verified at most."""

    count: int
    most: int


class Sources:
    """Several sources, asked in order as far as they are worth it.

    seconds    that the latest guesses took
    on_trial   whether one of them is to be judged yet
    """

    def __init__(self, sources: Sequence[Source], clock: Callable[[], float]) -> None:
        self._judged = [(source, Worth()) for source in sources]
        self._clock = clock
        self.forget()

    def forget(self) -> None:
        """Rows are other ones: what was guessed for others says nothing of them."""
        self.seconds, self.on_trial = 0.0, False
        self._asked: list[Worth] = []
        self._made: list[tuple[int, Trie, list[int]]] = []  # each row's length, its trie, its nodes after each source

    def ask(
        self, context: Context, tries: Sequence[Trie], floor: float, purse: Purse | None = None, most: int = FEW
    ) -> None:
        """Fill the tries, of which up to `most` nodes each may be verified; without a purse every source is asked."""
        self.rest(context)
        self._made = [(len(tokens), trie, []) for tokens, trie in zip(context.tokens, tries, strict=True)]
        for source, worth in self._judged:
            if purse is not None:
                told = price_of(source, context, worth.usual(purse.pace.seconds(len(tries))))
                if not self._may(worth, AT_FIRST if told is None else told, purse, _Rows(len(tries), most)):
                    continue
            begun = self._clock()
            source.add_guesses(context, tries, floor)
            took = self._clock() - begun
            worth.took(took, purse.pace.seconds(len(tries)) if purse else inf)
            self.seconds += took
            self._asked.append(worth)
            for _, trie, ends in self._made:
                ends.append(len(trie.tokens))

    def _may(self, worth: Worth, price: float, purse: Purse, rows: "_Rows") -> bool:
        """Whether one that takes so many plain steps is asked now."""
        seconds = self.seconds + price * purse.pace.seconds(rows.count)
        nodes = rows.count * (1 + (min(rows.most, FEW) if price > CHEAP else 1))
        trial = self.on_trial or worth.on_trial
        allowed = purse.allows(seconds, rows.count, nodes, trial=trial)
        if not allowed or not worth.is_due(purse.pace.tokens_a_second):
            return False
        self.on_trial = self.on_trial or worth.on_trial
        return True

    def rest(self, context: Context) -> None:
        """Ask nobody. Each source that was asked last gets the credit for what became text."""
        texts = context.tokens
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
