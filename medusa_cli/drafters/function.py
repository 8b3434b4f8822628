"""Guesses of any function: told a row's tokens, it says what may follow them."""

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from medusa_cli.contracts import Context
from medusa_cli.drafters.memory import NoMemory
from medusa_cli.drafters.ngram import Belief
from medusa_cli.drafters.trie import Trie
from medusa_cli.errors import PartError

SURE_AS = 3  # a path is believed at first as a copy after so many equal tokens is
Guess = Callable[[Sequence[int]], Iterable[int]]
"""A row's token ids so far, prompt and root included, to the ids that it guesses next; none where it has no guess."""


class FunctionGuesses(NoMemory):
    """A source of one path for each row; how often it is right down to each depth is learnt while decoding."""

    def __init__(self, guess: Guess, real_vocab: int, owner: str) -> None:
        """real_vocab: ids that may be guessed; owner: who brought the function, for messages."""
        self._guess = guess
        self._real_vocab = real_vocab
        self._owner = owner
        self._belief = Belief()
        self._offered: list[tuple[int, list[int]]] = []

    def join(self, first_row: int, prompts: Sequence[Sequence[int]], taps_BTLH: Tensor | None) -> None:
        """Rows are other ones: what was offered to others says nothing of them."""
        self._offered = []

    def drop(self, row: int) -> None:
        """As when rows join."""
        self._offered = []

    def add_guesses(self, context: Context, tries: Sequence[Trie], floor: float) -> None:
        """Each row's path with the chance that it is right so far. Raises PartError for what is no token id."""
        for (length, path), tokens in zip(self._offered, context.tokens, strict=False):
            self._belief.learn(SURE_AS, path, tokens[length:])
        self._offered = [(len(tokens), self.path(tokens)) for tokens in context.tokens]
        for (_, path), trie in zip(self._offered, tries, strict=True):
            trie.add_path(path, (chance for chance in self._belief.chances(SURE_AS, len(path)) if chance >= floor))

    def path(self, tokens: Sequence[int]) -> list[int]:
        """What may follow these tokens."""
        path = list(self._guess(tokens))
        for token in path:
            if not isinstance(token, int) or not 0 <= token < self._real_vocab:
                raise PartError(
                    f"{self._owner} guesses {token!r}, which is no token of this model",
                    f"it may guess whole numbers from 0 to {self._real_vocab - 1}; mend or remove that package",
                )
        return path
