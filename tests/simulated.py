"""A machine that is simulated: what steps and guesses take follows a script, and its clock is its own.

All that happens belongs to a place of the text, not to a time: how busy the machine is there, what comes next, which
guesses are right. So two ways of writing a text meet the same conditions, however far one is ahead of the other.
"""

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from medusa_cli.contracts import Context, Draft, Drafter
from medusa_cli.drafters.memory import NoMemory
from medusa_cli.drafters.none import NoDrafter
from medusa_cli.drafters.trie import Trie
from medusa_cli.trees.tree import TokenTree

Costs = Mapping[int, float]

# milliseconds of a step by its nodes: about those of SmolLM2-135M on two cores, of a machine where guesses cost next to
# nothing, and where each costs nearly a step
COMPILED = {1: 13.0, 2: 14.5, 3: 16.0, 4: 17.5, 6: 26.0, 8: 30.0, 12: 43.0, 16: 52.0, 24: 75.0, 32: 98.0}
FLAT = {1: 20.0, 2: 20.2, 4: 20.5, 8: 21.0, 16: 22.0, 32: 26.0}
STEEP = {1: 10.0, 2: 19.0, 4: 37.0, 8: 75.0, 16: 150.0, 32: 300.0}
MACHINES = {"compiled": COMPILED, "flat": FLAT, "steep": STEEP}

DEPTH = 8  # guesses of a chain
PROMPT = 20
WRONG = 10**6  # added to a token that is guessed wrongly


def always(value: float) -> Callable[[int], float]:
    """The same at every place."""
    return lambda place: value


@dataclass
class Script:
    """What happens, by the number of tokens written before it since the first text began.

    costs     what a step takes by its nodes, of all rows together
    busy      by how much everything takes longer
    dearer    by how much steps of more than a node a row take longer
    right     the chance of a guess, given that those before it are right
    said      what its source says of it; None: the truth
    price     what guessing takes, in plain steps of one row
    first     how many times as long the first step of a size takes, and the first guessing
    jitter    by which each step may take longer or shorter
    """

    costs: Costs
    busy: Callable[[int], float] = always(1.0)
    dearer: Callable[[int], float] = always(1.0)
    right: Callable[[int], float] = always(0.7)
    said: float | None = None
    price: float = 0.02
    first: float = 1.0
    jitter: float = 0.03


@dataclass
class Row:
    """A text that is being written: its number, its tokens, how many it shall have."""

    number: int
    tokens: list[int]
    wanted: int

    @property
    def place(self) -> int:
        """Tokens written."""
        return len(self.tokens) - PROMPT


@dataclass
class Machine:
    """Writes texts by a script with whoever drafts; texts of one seed are the same whoever does."""

    script: Script
    seed: int = 0
    now: float = 0.0
    written: int = 0  # tokens of rows that have ended
    rows: list[Row] = field(default_factory=list)
    sizes: set[int] = field(default_factory=set)
    asked: bool = False

    def clock(self) -> float:
        """Its own time, in seconds."""
        return self.now

    @property
    def place(self) -> int:
        """Tokens written by now, a row."""
        return self.written + sum(row.place for row in self.rows) // max(1, len(self.rows))

    def roll(self, *what: int) -> float:
        """A number in [0, 1) that belongs to this and nothing else."""
        return _roll(self.seed, *what)

    def pass_time(self, milliseconds: float, first: bool) -> None:
        """Work that takes so long on a quiet machine."""
        jitter = 1 + self.script.jitter * (2 * self.roll(1, self.place) - 1)
        self.now += milliseconds / 1000 * self.script.busy(self.place) * jitter * (self.script.first if first else 1.0)

    def guess(self, tokens: Sequence[int]) -> tuple[list[int], list[float]]:
        """A chain of guesses after a row's tokens, right as often as the script says, with their chances."""
        chain, chances, chance = [], [], 1.0
        for depth in range(DEPTH):
            token, place = tokens[-1] + depth + 1, self.written + len(tokens) - PROMPT + depth
            right = self.script.right(place)
            chain.append(token if self.roll(2, token) < right else token + WRONG)
            chance *= right if self.script.said is None else self.script.said
            chances.append(chance)
        return chain, chances

    def take_guessing_time(self) -> None:
        """Whoever guesses takes so long."""
        self.pass_time(self.script.price * self.script.costs[1], first=not self.asked)
        self.asked = True

    def write(self, drafter: Drafter, lengths: Sequence[int], most_rows: int = 1) -> list[float]:
        """Seconds that each text took from when it found a row; drafter memory is told of rows as an engine would."""
        waiting = [Row(number, self._prompt(number), wanted) for number, wanted in enumerate(lengths)]
        begun, took = {}, {}
        while self.rows or waiting:
            while waiting and len(self.rows) < most_rows:
                row = waiting.pop(0)
                drafter.join(len(self.rows), [row.tokens[:-1]], None)
                self.rows.append(row)
                begun[row.number] = self.now
            self._step(drafter)
            for row in [row for row in self.rows if row.place >= row.wanted]:
                took[row.number] = self.now - begun[row.number]
                self._retire(row, drafter)
        return [took[number] for number in range(len(lengths))]

    def _prompt(self, number: int) -> list[int]:
        return list(range(1000 * number, 1000 * number + PROMPT))

    def _retire(self, row: Row, drafter: Drafter) -> None:
        """The last row moves into the hole."""
        place, last = self.rows.index(row), len(self.rows) - 1
        if place != last:
            drafter.move(last, place)
            self.rows[place] = self.rows[last]
        drafter.drop(last)
        self.rows.pop()
        if not self.rows:
            self.written += row.wanted

    def _step(self, drafter: Drafter) -> None:
        texts = [row.tokens for row in self.rows]
        draft = drafter.propose(Context(texts, torch.tensor([text[-1] for text in texts]), torch.zeros(len(texts), 1)))
        each, rows = draft.tree.num_nodes, len(self.rows)
        cost = at(self.script.costs, rows * each) * (self.script.dearer(self.place) if each > 1 else 1.0)
        self.pass_time(cost, first=rows * each not in self.sizes)
        self.sizes.add(rows * each)
        tokens_BN = draft.tokens_BN.tolist()
        parents_XN = draft.tree.parents_XN.tolist()
        real_XN = draft.tree.real_XN.tolist()
        for place, row in enumerate(self.rows):
            shape = place if len(parents_XN) > 1 else 0
            row.tokens += self._kept(row, tokens_BN[place], parents_XN[shape], real_XN[shape])

    def _kept(self, row: Row, tokens: list[int], parents: list[int], real: list[bool]) -> list[int]:
        """The tokens of the path that is right, and the one after it."""
        last, node = row.tokens[-1], 0
        kept = []
        for index in range(1, len(tokens)):
            if real[index] and parents[index] == node and tokens[index] == last + len(kept) + 1:
                kept.append(tokens[index])
                node = index
        return [*kept, last + len(kept) + 1][: row.wanted - row.place]


@functools.cache
def _roll(*what: int) -> float:
    return random.Random(hash(what)).random()


def at(costs: Costs, nodes: int) -> float:
    """Between the sizes of a table, and beyond them, on a line."""
    known = sorted(costs.items())
    for (low, below), (high, above) in zip(known, known[1:], strict=False):
        if nodes <= high:
            return below + (above - below) * (nodes - low) / (high - low)
    (low, below), (high, above) = known[-2:]
    return above + (above - below) * (nodes - high) / (high - low)


class Guesses(NoMemory):
    """The source that guesses by the machine's script."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def add_guesses(self, context: Context, tries: Sequence[Trie], floor: float) -> None:
        """A chain for each row, which takes what the script says."""
        self._machine.take_guessing_time()
        for tokens, trie in zip(context.tokens, tries, strict=True):
            chain, chances = self._machine.guess(tokens)
            trie.add_path(chain, [chance for chance in chances if chance >= floor])


class Fixed(NoMemory):
    """Drafts the first `size` guesses of the script's chain in every step: a choice that is never changed."""

    name = "fixed"

    def __init__(self, machine: Machine, size: int) -> None:
        self._machine, self.size = machine, size

    def propose(self, context: Context) -> Draft:
        """A chain."""
        if not self.size:
            return NoDrafter().propose(context)
        self._machine.take_guessing_time()
        guessed = [[tokens[-1], *self._machine.guess(tokens)[0][: self.size]] for tokens in context.tokens]
        return Draft(torch.tensor(guessed), TokenTree.chain(self.size))


def plain(script: Script, seed: int, lengths: Sequence[int], most_rows: int = 1) -> list[float]:
    """Seconds of each text without guesses, in the same conditions."""
    return Machine(script, seed).write(NoDrafter(), lengths, most_rows)


def best_fixed(script: Script, seed: int, lengths: Sequence[int], sizes: Sequence[int]) -> list[float]:
    """Seconds of each text with whichever size is best over all of them but the first."""
    tried = []
    for size in sizes:
        machine = Machine(script, seed)
        tried.append(machine.write(Fixed(machine, size), lengths))
    return min(tried, key=lambda took: sum(took[1:]))
