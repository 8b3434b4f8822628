"""Token ids of a draft model and those of the target: the same ones where vocabularies agree, else by way of text.

Universal assisted generation (transformers' assisted decoding with different tokenizers) re-encodes text in the same
way; here each path of a tree is carried over by itself.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from medusa_cli.errors import TargetError

logger = logging.getLogger(__name__)

TAIL = 6  # tokens before a guess that are encoded with it, so that words are split as they stand
PROBES = (
    "Three planets: Mars, Venus and Earth.\n\n1. Mars is red; it has 2 moons!",
    'def add(a, b):\n    return a + b  # "sum"\n',
    "Größe, café, 你好, 🙂 and\ttabs",
)
CUT_CHARACTER = "\ufffd"  # what a tokenizer gives for bytes that are no whole character yet


@dataclass(frozen=True)
class Guessed:
    """A path of ids, and the chance that it is right down to each of them."""

    ids: Sequence[int]
    chances: Sequence[float]


class Translation(Protocol):
    """Carries texts to the draft model, and its paths back."""

    def to_draft(self, tokens: Sequence[int]) -> list[int]:
        """The target's text as the draft model reads it."""

    def from_draft(self, tokens: Sequence[int], read: Sequence[int], path: Guessed) -> Guessed:
        """A path that the draft model found after what it read, as guesses after the target's text."""


class SameIds:
    """Both have one vocabulary; ids beyond the target's own are no guesses."""

    def __init__(self, real_vocab: int) -> None:
        self._real_vocab = real_vocab

    def to_draft(self, tokens: Sequence[int]) -> list[int]:
        """As it is."""
        return list(tokens)

    def from_draft(self, tokens: Sequence[int], read: Sequence[int], path: Guessed) -> Guessed:
        """Up to the first id that is padding of the target's matrix."""
        count = next((place for place, token in enumerate(path.ids) if token >= self._real_vocab), len(path.ids))
        return Guessed(path.ids[:count], path.chances[:count])


@dataclass(frozen=True)
class Coder:
    """One tokenizer: text to ids without marks of its own, and back."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]

    @classmethod
    def of(cls, tokenizer: Any) -> "Coder":
        """A tokenizer of transformers; what it marks beginnings and ends with is left to the text."""

        def encode(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False))

        def decode(ids: Sequence[int]) -> str:
            return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

        return cls(encode, decode)


class ByText:
    """The text is encoded anew for the draft model, and what it adds is encoded anew for the target."""

    def __init__(self, target: Coder, draft: Coder) -> None:
        self._target, self._draft = target, draft

    def to_draft(self, tokens: Sequence[int]) -> list[int]:
        """Without the beginning of a character at its end."""
        return self._draft.encode(self._target.decode(tokens).rstrip(CUT_CHARACTER))

    def from_draft(self, tokens: Sequence[int], read: Sequence[int], path: Guessed) -> Guessed:
        """As far as the text goes on at the border of the target's last token; else nothing."""
        return encoded(self._target, tokens, self._ends(read[-TAIL:], path.ids), path.chances)

    def _ends(self, tail: Sequence[int], ids: Sequence[int]) -> list[str]:
        """The new text after each id of a path."""
        start = len(self._draft.decode(tail))
        return [self._draft.decode([*tail, *ids[: count + 1]])[start:] for count in range(len(ids))]


def encoded(target: Coder, tokens: Sequence[int], ends: Sequence[str], chances: Sequence[float]) -> Guessed:
    """New text as guesses after the target's tokens; nothing where it doesn't go on at the border of the last one.

    ends      the new text after each step of the draft model, and
    chances   that it is right so far
    """
    before = target.decode(tokens[-TAIL:])
    held = target.encode(before)
    found = target.encode(before + ends[-1])
    if found[: len(held)] != held or ends[-1].endswith(CUT_CHARACTER):
        return Guessed([], [])
    ids, reached, spread = found[len(held) :], 0, list[float]()
    for end in accumulate(len(target.decode([each])) for each in ids):
        while reached < len(ends) - 1 and len(ends[reached]) < end:
            reached += 1
        spread.append(chances[reached])
    return Guessed(ids, spread)


def between(target: Any, draft: Any, names: tuple[str, str]) -> Translation:
    """From a target's tokenizer to a draft model's. Raises TargetError where texts can't be carried over.

    names   of both models, for messages
    """
    for tokenizer, name in zip((target, draft), names, strict=True):
        if tokenizer is None:
            raise TargetError(f"{name} has no tokenizer: guesses can't be carried over", "use a model with a tokenizer")
    theirs, ours = draft.get_vocab(), target.get_vocab()
    if all(theirs.get(token) == number for token, number in ours.items()):
        return SameIds(len(ours))
    coder = Coder.of(draft)
    check_gives_back(coder, names[1])
    logger.info("%s has another vocabulary than %s: guesses are carried over as text", names[1], names[0])
    return ByText(Coder.of(target), coder)


def check_gives_back(coder: Coder, name: str) -> None:
    """Raise TargetError for a tokenizer that loses some of a text: what it guesses would not go on with it."""
    for text in PROBES:
        found = coder.decode(coder.encode(text))
        if found.strip() != text.strip():
            raise TargetError(
                f"{name} can't guess for another vocabulary: of {text[:30]!r} its tokenizer gives back {found[:30]!r}",
                "use a draft model of the same family, or one whose tokenizer keeps texts as they are",
            )
