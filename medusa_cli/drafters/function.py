"""Guesses of any function: told a row's tokens, it says what may follow them."""

import logging
import math
import operator
import traceback
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, islice
from typing import Any, Literal

from torch import Tensor

from medusa_cli.contracts import Context
from medusa_cli.drafters.belief import Belief
from medusa_cli.drafters.memory import NoMemory
from medusa_cli.drafters.trie import Trie
from medusa_cli.errors import PartError

logger = logging.getLogger(__name__)

MOST_PATHS, DEEPEST = 64, 32  # of what a function returns, that is looked at
SURE_AS = (3, 2, 1)  # its first, second and later paths are believed at first as copies after so many equal tokens
Guess = Callable[[Sequence[int]], Any]
"""A row's token ids so far, prompt and root included, to what may follow: one path of ids, several of them, pairs of a
path and its probability (one number, or one for each token given those before it), or a trie with `tokens`, `parents`
and `chances` as of medusa_cli.reference. Nothing where it has no guess."""

Path = tuple[list[int], list[float] | None]
"""Ids, and the chance that they are right down to each of them, if that was said."""


class FunctionGuesses(NoMemory):
    """A source of the paths that a function returns. How often paths without a chance are right is learnt."""

    def __init__(self, guess: Guess, real_vocab: int, owner: str, errors: Literal["warn", "raise"] = "warn") -> None:
        """owner: who brought the function, for messages; errors: as of drafters.source.Wishes."""
        self._guess = guess
        self._real_vocab = real_vocab
        self._owner = owner
        self._raises = errors == "raise"
        self._failed = False
        self._belief = Belief()
        self._offered: list[tuple[int, list[Path]]] = []

    def join(self, first_row: int, prompts: Sequence[Sequence[int]], taps_BTLH: Tensor | None) -> None:
        """Rows are other ones: what was offered to others says nothing of them."""
        self._offered = []

    def drop(self, row: int) -> None:
        """As when rows join."""
        self._offered = []

    def add_guesses(self, context: Context, tries: Sequence[Trie], floor: float) -> None:
        """Each row's paths. Raises PartError where the function fails and that is to be told at once."""
        for (length, guessed), tokens in zip(self._offered, context.tokens, strict=False):
            for rank, (path, told) in enumerate(guessed):
                if told is None:
                    self._belief.learn(_sure_as(rank), path, tokens[length:])
        self._offered = [(len(tokens), self.paths(tokens)) for tokens in context.tokens]
        for (_, paths), trie in zip(self._offered, tries, strict=True):
            for rank, (path, told) in enumerate(paths):
                learnt = self._belief.chances(_sure_as(rank), len(path))
                chances: Iterable[float] = learnt if told is None else told
                trie.add_path(path, (chance for chance in chances if chance >= floor))

    def paths(self, tokens: Sequence[int]) -> list[Path]:
        """What may follow these tokens; nothing once the function has failed. Raises PartError as `add_guesses`."""
        if self._failed:
            return []
        try:
            return [self._checked(path) for path in _paths_of(self._guess(tokens))]
        # a stranger's function may fail in any way
        except Exception as error:
            told = PartError(f"{self._owner} {_what_and_where(error)}", "mend it, or leave it out")
            if self._raises:
                raise told from error
            self._failed = True
            logger.warning("%s; decoding goes on without its guesses", told.message)
            return []

    def _checked(self, path: Path) -> Path:
        for token in path[0]:
            if not 0 <= token < self._real_vocab:
                raise _Rubbish(f"guesses {token}, which is no token of this model (0 to {self._real_vocab - 1})")
        return path


class _Rubbish(Exception):
    """What a function returned, where it is no guess."""


def _sure_as(rank: int) -> int:
    return SURE_AS[min(rank, len(SURE_AS) - 1)]


def _paths_of(found: Any) -> Iterable[Path]:
    """What a function returned, as paths. Raises _Rubbish."""
    if found is None:
        return []
    if all(hasattr(found, name) for name in ("tokens", "parents", "chances")):
        return _paths_of_trie(found)
    if isinstance(found, str) or not isinstance(found, Iterable):
        raise _Rubbish(f"returned {found!r:.80}, which is neither a path of token ids nor paths")
    members = list(islice(found, MOST_PATHS))
    if members and all(hasattr(member, "__index__") for member in members):
        return [(_ids(members), None)]
    return [_path_of(member) for member in members]


def _path_of(member: Any) -> Path:
    """A path, or a path and its chance."""
    if isinstance(member, tuple) and len(member) == 2 and isinstance(member[0], Iterable):
        ids = _ids(member[0])
        return ids, _chances(member[1], len(ids))
    return _ids(member), None


def _ids(found: Any) -> list[int]:
    if isinstance(found, str) or not isinstance(found, Iterable):
        raise _Rubbish(f"guesses {found!r:.80}, which is no path of token ids")
    ids = []
    for token in islice(found, DEEPEST):
        if not hasattr(token, "__index__"):
            raise _Rubbish(f"guesses {token!r:.80}, which is no token id")
        ids.append(operator.index(token))
    return ids


def _chances(told: Any, depth: int) -> list[float]:
    """That a path is right down to each token, from its own probability or from one for each token."""
    try:
        numbers = [float(each) for each in told] if isinstance(told, Iterable) else [float(told)]
    except (TypeError, ValueError) as error:
        raise _Rubbish(f"gives {told!r:.80} as a probability") from error
    if not all(0 <= number <= 1 for number in numbers):  # nan is not either
        raise _Rubbish(f"gives {told!r:.80} as a probability")
    if isinstance(told, Iterable):
        return list(accumulate(numbers, operator.mul))
    return [math.pow(numbers[0], place / depth) for place in range(1, depth + 1)]


def _paths_of_trie(trie: Any) -> list[Path]:
    """The path to each node, the root left out: one that leads to others as well."""
    depths, paths = [0], list[Path]()
    for node in range(1, min(len(trie.tokens), MOST_PATHS + 1)):
        parent = operator.index(trie.parents[node])
        if not 0 <= parent < node:
            raise _Rubbish("returns a trie in which a node comes before its parent")
        before, chances = paths[parent - 1] if parent else ([], [])
        assert chances is not None
        depths.append(depths[parent] + 1)
        paths.append(([*before, *_ids([trie.tokens[node]])], [*chances, *_chances(trie.chances[node], 1)]))
    return [path for path, depth in zip(paths, depths[1:], strict=True) if depth <= DEEPEST]


def _what_and_where(error: Exception) -> str:
    """The end of a sentence."""
    if isinstance(error, _Rubbish):
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    told = " ".join(str(error).split())[:200]
    return f"failed at {last.filename}:{last.lineno}: {type(error).__name__}{': ' if told else ''}{told}"
