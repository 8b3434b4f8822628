"""Guesses copied from the text itself, and from earlier replies: what followed the longest part of its end before.

SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975) with a suffix automaton (Blumer et al. 1985) that grows with the
text, a token at a time: a match may be of any length, and what followed it is weighed by how often it did. How far a
match is to be believed is learnt while decoding, by its length. Costs no forward, and finds long copies in summaries,
code edits and retrieved text.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from torch import Tensor

from medusa_cli.contracts import Context
from medusa_cli.drafters.belief import Belief
from medusa_cli.drafters.memory import NoMemory
from medusa_cli.drafters.source import Wishes
from medusa_cli.drafters.suffix_memory import SuffixMemory
from medusa_cli.drafters.trie import ROOT, Trie
from medusa_cli.model.target import Target

NODES = 24  # guesses of a step at most: no budget takes more
DEPTH = 16  # tokens copied after a match
SHORTER = 3  # matches that are looked at, from the longest on
NEXT = 6  # tokens that followed one match
LATEST = 0.5  # times that the latest of them counts more
COUNTED = 64  # states that a token is counted in, from the longest on: a loop has no end of them
START = 0


class Automaton:
    """Every part of a text as a path from the state START, in space of the text's length.

    next     what may follow: token -> state
    link     the state of the longest part of its end that is another state
    length   tokens of the longest part that leads here
    counts   how often it stands in the text, and
    ends     where it ended last
    """

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.counts = [0]
        self.ends = [0]
        self.last = START
        self._size = 0

    def add(self, token: int) -> None:
        """The text is a token longer."""
        self._size += 1
        new = self._state(self.length[self.last] + 1, {}, 0, 0)
        state = self.last
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        self.link[new] = START if state < 0 else self._ending(state, token)
        self.last = new
        for _ in range(COUNTED):
            self.counts[new] += 1
            self.ends[new] = self._size
            new = self.link[new]
            if new <= START:
                break

    def _ending(self, state: int, token: int) -> int:
        """The state of what leads to `state` and the token after it, alone: made, where others share it."""
        found = self.next[state][token]
        if self.length[found] == self.length[state] + 1:
            return found
        clone = self._state(self.length[state] + 1, dict(self.next[found]), self.counts[found], self.ends[found])
        self.link[clone], self.link[found] = self.link[found], clone
        while state >= 0 and self.next[state].get(token) == found:
            self.next[state][token] = clone
            state = self.link[state]
        return clone

    def _state(self, length: int, following: dict[int, int], counted: int, end: int) -> int:
        self.next.append(following)
        self.link.append(START)
        self.length.append(length)
        self.counts.append(counted)
        self.ends.append(end)
        return len(self.next) - 1


@dataclass(frozen=True)
class Match:
    """An end of the text that stood somewhere before: where an automaton is after it, and how long it is."""

    automaton: Automaton
    state: int
    length: int

    def shorter(self) -> Iterator["Match"]:
        """This one, then ends of it that stood elsewhere too."""
        state, length = self.state, self.length
        for _ in range(SHORTER):
            if state <= START:
                return
            yield Match(self.automaton, state, length)
            state = self.automaton.link[state]
            length = self.automaton.length[state]


class Reader:
    """One row's text: an automaton of its own, and where it is in what others wrote."""

    def __init__(self, shared: Automaton | None) -> None:
        self.num_read = 0
        self.offered: list[tuple[int, list[int]]] = []  # likeliest copy of each match, with the match's length
        self._own = Automaton()
        self._shared = shared
        self._state, self._length = START, 0

    def read(self, tokens: Sequence[int]) -> None:
        """The text has grown to these tokens."""
        for token in tokens[self.num_read :]:
            self._own.add(token)
            if self._shared is not None:
                self._follow(self._shared, token)
        self.num_read = len(tokens)

    def matches(self) -> list[Match]:
        """From the longest on."""
        own, last = self._own, self._own.last
        found = [*Match(own, own.link[last], own.length[own.link[last]]).shorter()] if last else []
        if self._shared is not None:
            found += Match(self._shared, self._state, self._length).shorter()
        return sorted(found, key=lambda match: -match.length)

    def _follow(self, shared: Automaton, token: int) -> None:
        while self._state > START and token not in shared.next[self._state]:
            self._state = shared.link[self._state]
            self._length = shared.length[self._state]
        if (state := shared.next[self._state].get(token)) is not None:
            self._state, self._length = state, self._length + 1


class Suffixes(NoMemory):
    """The source of guesses: a reader for each row, one belief for the run."""

    @classmethod
    def of(cls, target: Target, wishes: Wishes) -> "Suffixes":
        """With the replies of this model in the memory's file, if one was named. Raises DataError."""
        return cls(SuffixMemory.open(wishes.memory, target.fingerprint) if wishes.memory else None)

    def __init__(self, memory: SuffixMemory | None = None) -> None:
        self._memory = memory
        self._shared: Automaton | None = None
        if memory is not None:
            self._shared = Automaton()
            for reply in memory.replies:
                self._remember(reply)
        self._belief = Belief()
        self._readers: list[Reader] = []
        self._prompts: list[int] = []
        self._texts: list[Sequence[int]] = []

    def join(self, first_row: int, prompts: Sequence[Sequence[int]], taps_BTLH: Tensor | None) -> None:
        """New texts; they are read when guesses are wanted."""
        rows = slice(first_row, first_row + len(prompts))
        self._readers[rows] = [Reader(self._shared) for _ in prompts]
        self._prompts[rows] = [len(prompt) for prompt in prompts]
        self._texts[rows] = list(prompts)

    def keep(self, context: Context, taps_BDLH: Tensor | None) -> None:
        """The texts as they are now, for who remembers replies: each is read once more, when its row has ended."""
        if self._memory is not None:
            self._texts[: len(context.tokens)] = context.tokens

    def move(self, source: int, row: int) -> None:
        """The reader goes with its text; what stood in the row has ended."""
        self.drop(row)
        self._readers[row], self._prompts[row] = self._readers[source], self._prompts[source]
        self._texts[row], self._texts[source] = self._texts[source], ()

    def drop(self, row: int) -> None:
        """A reply that has ended is remembered, if a file was named. Raises DataError where it can't be written."""
        reply = list(self._texts[row][self._prompts[row] :])
        self._texts[row] = ()
        if self._memory is not None and reply:
            self._memory.add(reply)
            self._remember(reply)

    def _remember(self, reply: Sequence[int]) -> None:
        assert self._shared is not None
        for token in (
            *reply,
            -len(self._shared.next),
        ):  # no two replies are one text: each ends with what no text holds
            self._shared.add(token)

    def add_guesses(self, context: Context, tries: Sequence[Trie], floor: float) -> None:
        """What followed the ends of each row's text, each with the chance that it is right so far."""
        for reader, tokens, trie in zip(self._readers, context.tokens, tries, strict=False):
            for length, copied in reader.offered:
                self._belief.learn(length, copied, tokens[reader.num_read :])
            reader.read(tokens)
            reader.offered = [
                (match.length, copied) for match in reader.matches() if (copied := self._grow(match, trie, floor))
            ]

    def _grow(self, match: Match, trie: Trie, floor: float) -> list[int]:
        """Add what followed the match, likeliest first; its likeliest copy."""
        order = count()
        waiting = [(-1.0, next(order), ROOT, match.state, 0)]
        best: list[int] = []
        for _ in range(NODES):
            if not waiting:
                break
            reached, _, node, state, depth = heapq.heappop(waiting)
            sure = -reached * self._belief.chance(match.length, depth)
            for place, (token, share, state_after) in enumerate(_following(match.automaton, state)):
                chance = sure * share
                if chance < floor or depth == DEPTH:
                    break
                child = trie.add_guess(node, token, chance)
                if place == 0 and len(best) == depth:
                    best.append(token)
                heapq.heappush(waiting, (-chance, next(order), child, state_after, depth + 1))
        return best


def _following(automaton: Automaton, state: int) -> list[tuple[int, float, int]]:
    """(token, share of the times that it followed, the state after it), the likeliest first."""
    while state > START and not automaton.next[state]:
        state = automaton.link[state]  # past the text's end the copy goes on with itself, as a loop would
    after = {token: state for token, state in automaton.next[state].items() if token >= 0}
    latest = max((automaton.ends[state] for state in after.values()), default=0)
    times = {
        token: automaton.counts[state] + LATEST * (automaton.ends[state] == latest) for token, state in after.items()
    }
    total = sum(times.values())
    return [(token, times[token] / total, after[token]) for token in heapq.nlargest(NEXT, times, key=times.__getitem__)]
