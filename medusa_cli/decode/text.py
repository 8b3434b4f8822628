"""Token ids as text, while they arrive. This file knows no loop and no printing.

`decode_text` is the text of an answer. `TextStream` gives the same text in chunks, `StopStrings` says where a stop
string ends it. Both decode a short window instead of everything, as TGI and vLLM do, and unlike them are exact:

- A character whose bytes are still arriving decodes to U+FFFD: it is held until whole, or until the end.
- In byte-fallback vocabularies (Llama 2, Gemma) a run of byte tokens such as `<0xE2>` decodes all together: one
  incomplete character at its end turns the whole run into U+FFFD. So the run is held until another token ends it.
- Some decoders drop a space at the start of what they decode, so a window keeps text that was given out before.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from medusa_cli.errors import RecipeError

_REPLACEMENT = "\ufffd"
# UTF-8 spends at most four bytes on a character, and a token that shows holds at least one byte.
_MAX_BYTES = 4


def decode_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of an answer: special tokens hidden, nothing tidied up."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


class TextStream:
    """The text of one answer in chunks: all that `feed` and `flush` return joins to `decode_text` of all ids.

    With `stops`, the joined text ends before the first stop string, `stopped` turns true, and later ids are ignored;
    text that may be the start of a stop string is held back until that is known.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        _check_stops(stops)
        self.stopped = False
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._vocabulary = _Vocabulary(tokenizer)
        # ids whose text matters for what comes next; the first `_context` of them lie behind a clean cut.
        self._window: list[int] = []
        self._context = 0
        # characters given out (or held for a stop string) after the text of the context.
        self._sent = 0
        self._held = ""

    def feed(self, ids: Iterable[int]) -> str:
        """The text that is certain now that `ids` have come."""
        if self.stopped:
            return ""
        self._window += [index for index in ids if index not in self._vocabulary.hidden]
        return self._past_stops(self._certain(), at_end=False)

    def flush(self) -> str:
        """The rest, once no more ids will come: also characters that were never finished."""
        if self.stopped:
            return ""
        text = decode_text(self._tokenizer, self._window)
        rest = text[self._base() + self._sent :]
        self._sent += len(rest)
        return self._past_stops(rest, at_end=True)

    def _base(self) -> int:
        """How many characters the context has."""
        return len(decode_text(self._tokenizer, self._window[: self._context]))

    def _certain(self) -> str:
        """The part of the window's text that no later id can change and that wasn't given out before."""
        run = self._vocabulary.byte_run(self._window)
        if len(self._window) - run <= self._context:
            return ""
        settled = self._window[: len(self._window) - run]
        text = decode_text(self._tokenizer, settled)
        base = self._base()
        # Bytes that may yet become a character show as exactly one U+FFFD, the last one.
        certain = len(text) - text.endswith(_REPLACEMENT)
        chunk = text[base + self._sent : certain]
        self._sent += len(chunk)
        self._move(settled, text, base)
        return chunk

    def _move(self, settled: list[int], text: str, base: int) -> None:
        """Start the window at the context's end, and put the context's end at the last clean cut."""
        cut = self._clean_cut(settled, text)
        if cut is None or not decode_text(self._tokenizer, settled[self._context : cut]):
            return
        self._sent -= len(decode_text(self._tokenizer, settled[:cut])) - base
        self._window = self._window[self._context :]
        self._context = cut - self._context

    def _clean_cut(self, settled: list[int], text: str) -> int | None:
        """The last place past the context where no character is cut in two, if one is near the end."""
        if not text.endswith(_REPLACEMENT):
            return len(settled)
        for cut in range(len(settled) - 1, max(self._context, len(settled) - 2 * _MAX_BYTES), -1):
            # The second part of a cut character shows U+FFFD of its own, so the halves are longer than the whole.
            if decode_text(self._tokenizer, settled[:cut]) + decode_text(self._tokenizer, settled[cut:]) == text:
                return cut
        return None

    def _past_stops(self, chunk: str, *, at_end: bool) -> str:
        """What of the held text and `chunk` may be given out."""
        text = self._held + chunk
        found = _first_stop(text, self._stops)
        if found is not None:
            self.stopped, self._held = True, ""
            return text[: found.start]
        held = 0 if at_end else _possible_start(text, self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


@dataclass(frozen=True)
class StopHit:
    """A stop string came: keep `num_new` of the new ids, and `text_end` characters of the answer's text."""

    num_new: int
    text_end: int


class StopStrings:
    """Finds stop strings in the text of ids, wherever tokens and steps are cut."""

    def __init__(self, strings: Sequence[str], tokenizer: Any) -> None:
        """Raises RecipeError when a string is empty."""
        _check_stops(strings)
        self.strings = tuple(strings)
        self._tokenizer = tokenizer
        self._vocabulary = _Vocabulary(tokenizer)
        self._reach = _MAX_BYTES * (max(map(len, strings), default=0) + 2)

    def find(self, so_far: Sequence[int], new: Sequence[int]) -> StopHit | None:
        """Where the first stop string ends within `new`, given the answer's ids before, which hold none.

        `num_new` is the smallest number of new ids whose text, after `so_far`, holds a stop string.
        """
        if not self.strings:
            return None
        window = self._tail(so_far)
        for count, index in enumerate(new, start=1):
            window.append(index)
            text = decode_text(self._tokenizer, window)
            if not any(stop in text for stop in self.strings):
                continue
            # The window may begin inside a character, so the whole answer has the last word.
            found = _first_stop(decode_text(self._tokenizer, [*so_far, *new[:count]]), self.strings)
            if found is not None:
                return StopHit(count, found.start)
        return None

    def _tail(self, ids: Sequence[int]) -> list[int]:
        """The last ids that may hold the start of a stop string: enough that show, and no half run of bytes."""
        shown = 0
        start = len(ids)
        inside = self._vocabulary.bytes | self._vocabulary.hidden
        while start and (shown < self._reach or ids[start] in inside):
            start -= 1
            shown += ids[start] not in self._vocabulary.hidden
        return list(ids[start:])


class _Vocabulary:
    """Which ids don't show, and which are single bytes that decode together with their neighbours."""

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer.is_fast:
            self.hidden = frozenset(index for index, token in tokenizer.added_tokens_decoder.items() if token.special)
        else:
            self.hidden = frozenset(tokenizer.all_special_ids)
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        found = tokenizer.convert_tokens_to_ids(names)
        # A missing name gives the id of the unknown token, or None.
        self.bytes = frozenset(
            index
            for name, index in zip(names, found, strict=True)
            if index is not None and tokenizer.convert_ids_to_tokens(index) == name
        )

    def byte_run(self, ids: Sequence[int]) -> int:
        """How many byte tokens `ids` ends with."""
        run = 0
        while run < len(ids) and ids[-1 - run] in self.bytes:
            run += 1
        return run


@dataclass(frozen=True)
class _Place:
    """Characters start to end of a stop string."""

    start: int
    end: int


def _check_stops(strings: Sequence[str]) -> None:
    """Raise RecipeError when a stop string is empty: it would stop before the first token."""
    if any(not stop for stop in strings):
        raise RecipeError("an empty stop string", "give --stop some text, or leave it out")


def _first_stop(text: str, strings: Sequence[str]) -> _Place | None:
    """The stop string that is complete first; of two that end together, the longer."""
    places = [_Place(start, start + len(stop)) for stop in strings if (start := text.find(stop)) >= 0]
    return min(places, key=lambda place: (place.end, place.start), default=None)


def _possible_start(text: str, strings: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    longest = max(map(len, strings), default=0) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in strings):
            return length
    return 0
