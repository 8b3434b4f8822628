"""Where stop strings end an answer, wherever tokens and steps are cut. This file knows no loop.

Each id is looked at once, in the short window of `TextStream`. Only bytes that decode together have no short window:
their text is followed here byte by byte, and what is found in it is confirmed by decoding the answer once.
"""

import codecs
from collections.abc import Sequence
from typing import Any

from medusa_cli.decode.text import TextStream, Vocabulary, decode_text, start_of_stop, stops_of

_REPLACEMENT = "\ufffd"


class StopStrings:
    """Stop strings of one run; each of its texts gets a finder of its own."""

    def __init__(self, strings: Sequence[str], tokenizer: Any, ends: frozenset[int] = frozenset()) -> None:
        """Raises RecipeError as `stops_of`. `ends` are ids that end a turn, and no text."""
        self.tokenizer = tokenizer
        self.ends = ends
        self.vocabulary = Vocabulary(tokenizer, ends)
        self.stops = stops_of(strings, self.vocabulary)

    def finder(self) -> "StopFinder":
        """For one text."""
        return StopFinder(self)


class StopFinder:
    """Finds the first stop in one answer; told each of its ids once, in order."""

    def __init__(self, asked: StopStrings) -> None:
        self._asked = asked
        self._stream = TextStream(asked.tokenizer, ends=asked.ends, vocabulary=asked.vocabulary)
        self._reach = max(map(len, asked.stops.strings), default=0)
        self._run = _ByteRun("strict" if asked.tokenizer.is_fast else "replace", self._reach)
        self._ids: list[int] = []
        self._tail = ""  # the last characters that are certain

    def __call__(self, new: Sequence[int]) -> int | None:
        """The smallest number of new ids whose text, after those before, holds a stop; None while there is none."""
        for count, index in enumerate(new, start=1):
            if index in self._asked.stops.ids or self._ends_with(index):
                return count
        return None

    def _ends_with(self, index: int) -> bool:
        """Whether a stop string is complete with this id."""
        self._ids.append(index)
        if index in self._asked.vocabulary.hidden:
            return False
        text = self._tail + self._stream.feed([index])
        if index in self._asked.vocabulary.bytes:
            self._run.add(self._asked.vocabulary.bytes[index])
        else:
            self._run.clear()
        self._tail = text[max(0, len(text) - self._reach) :]
        if start_of_stop(text + self._stream.unfinished + self._run.text, self._asked.stops.strings) is None:
            return False
        # decoders may drop a space where a text begins, so the whole answer has the last word
        whole = decode_text(self._asked.tokenizer, self._ids, self._asked.ends)
        return start_of_stop(whole, self._asked.stops.strings) is not None


class _ByteRun:
    """Byte tokens that decode together, as the text that they show so far: U+FFFD each while they are no characters."""

    def __init__(self, errors: str, reach: int) -> None:
        self._new = codecs.getincrementaldecoder("utf-8")
        self._errors = errors
        self._reach = reach
        self.clear()

    def clear(self) -> None:
        """Another token has come."""
        self._decoder = self._new(self._errors)
        self._count, self._broken, self._whole = 0, False, ""

    def add(self, byte: int) -> None:
        """One more."""
        self._count += 1
        try:
            self._whole += "" if self._broken else self._decoder.decode(bytes([byte]))
        except UnicodeDecodeError:  # nothing that follows mends it
            self._broken = True
        self._whole = self._whole[-self._reach :] if self._reach else ""

    @property
    def text(self) -> str:
        """The last characters of what is shown."""
        waiting = len(self._decoder.getstate()[0])
        if self._errors == "strict" and (self._broken or waiting):
            return _REPLACEMENT * min(self._count, self._reach)
        return self._whole + _REPLACEMENT * waiting
