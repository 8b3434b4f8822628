"""Token ids as text, while they arrive. This file knows no loop and no printing.

`decode_text` is the text of an answer. `TextStream` gives the same text in chunks. It decodes a short window instead of
everything, as TGI and vLLM do, and unlike them is exact:

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


def decode_text(tokenizer: Any, ids: Iterable[int], ends: frozenset[int] = frozenset()) -> str:
    """The text of an answer: special tokens and the ids that end a turn hidden, nothing tidied up."""
    shown = [index for index in ids if index not in ends]
    return str(tokenizer.decode(shown, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class Vocabulary:
    """Which ids don't show, and which are single bytes that decode together with their neighbours.

    hidden   special tokens, and `ends`: ids that end a turn, whatever the tokenizer calls them
    bytes    byte values by id; empty where such names are words like others
    """

    def __init__(self, tokenizer: Any, ends: frozenset[int] = frozenset()) -> None:
        self.special = _special_tokens(tokenizer)
        added = {index: str(token) for index, token in tokenizer.added_tokens_decoder.items() if index in ends}
        self.named = {**self.special, **{name: index for index, name in added.items()}}
        self.hidden = frozenset(self.special.values()) | ends
        self.bytes = _byte_tokens(tokenizer)


@dataclass(frozen=True)
class Stops:
    """What ends an answer before the model does: strings of its text, and hidden tokens, which are no text."""

    strings: tuple[str, ...]
    ids: frozenset[int]


def stops_of(strings: Sequence[str], vocabulary: Vocabulary) -> Stops:
    """Stop strings as text and ids: one that is the name of a hidden token means the token.

    Raises RecipeError for an empty one, which would stop before the first token, and for one that holds such a name
    beside other text, which would never be found.
    """
    for stop in strings:
        if not stop:
            raise RecipeError("an empty stop string", "give --stop some text, or leave it out")
        held = next((name for name in vocabulary.named if name in stop and stop not in vocabulary.named), None)
        if held:
            raise RecipeError(
                f"the stop string {stop!r} holds the special token {held}, which is no text of an answer",
                f"name the token alone: --stop '{held}'",
            )
    ids = frozenset(index for name, index in vocabulary.named.items() if name in strings)
    return Stops(tuple(strings), ids)


class TextStream:
    """The text of one answer in chunks: all that `feed` and `flush` return joins to `decode_text` of all ids.

    With `stops`, the joined text ends before the first of them, `stopped` turns true, and later ids are ignored; text
    that may be the start of a stop string is held back until that is known.

    ends         ids that end a turn: they are no text
    vocabulary   of this tokenizer and these ends, where it is known: it takes milliseconds to find
    """

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str] = (),
        ends: frozenset[int] = frozenset(),
        vocabulary: Vocabulary | None = None,
    ) -> None:
        self.stopped = False
        self._tokenizer = tokenizer
        self._vocabulary = Vocabulary(tokenizer, ends) if vocabulary is None else vocabulary
        self._stops = stops_of(stops, self._vocabulary)
        # ids whose text matters for what comes next; the first `_context` of them lie behind a clean cut, and show
        # `_base` characters. The last `_run` of them are bytes that a later one may spoil.
        self._window: list[int] = []
        self._context = self._base = self._run = 0
        # characters given out (or held for a stop string) after the text of the context.
        self._sent = 0
        self._held = ""
        # the text of bytes that may yet become a character
        self.unfinished = ""

    def feed(self, ids: Iterable[int]) -> str:
        """The text that is certain now that `ids` have come."""
        for index in ids:
            if self.stopped:
                break
            if index in self._stops.ids:
                return self._up_to_here()
            if index not in self._vocabulary.hidden:
                self._window.append(index)
                self._run = self._run + 1 if index in self._vocabulary.bytes else 0
        return "" if self.stopped else self._past_stops(self._certain(), at_end=False)

    def flush(self) -> str:
        """The rest, once no more ids will come: also characters that were never finished."""
        if self.stopped:
            return ""
        text = decode_text(self._tokenizer, self._window)
        rest = text[self._base + self._sent :]
        self._sent += len(rest)
        return self._past_stops(rest, at_end=True)

    def _up_to_here(self) -> str:
        """A token that stops has come: what is left, and nothing after it."""
        text = self.flush()
        self.stopped = True
        return text

    def _certain(self) -> str:
        """The part of the window's text that no later id can change and that wasn't given out before."""
        past = len(self._window) - self._run
        if past <= self._context:
            return ""
        settled = self._window[:past]
        text = decode_text(self._tokenizer, settled)
        # Bytes that may yet become a character show as exactly one U+FFFD, the last one.
        certain = len(text) - text.endswith(_REPLACEMENT)
        chunk = text[self._base + self._sent : certain]
        self.unfinished = text[certain:]
        self._sent += len(chunk)
        self._move(settled, text)
        return chunk

    def _move(self, settled: list[int], text: str) -> None:
        """Start the window at the context's end, and put the context's end at the last clean cut."""
        cut = self._clean_cut(settled, text)
        fresh = "" if cut is None else decode_text(self._tokenizer, settled[self._context : cut])
        if cut is None or not fresh:
            return
        shown = text if cut == len(settled) else decode_text(self._tokenizer, settled[:cut])
        self._sent -= len(shown) - self._base
        self._window = self._window[self._context :]
        self._context, self._base = cut - self._context, len(fresh)

    def _clean_cut(self, settled: list[int], text: str) -> int | None:
        """The last place past the context where no character is cut in two, if one is near the end."""
        if not text.endswith(_REPLACEMENT):
            return len(settled)
        for cut in range(len(settled) - 1, max(self._context, len(settled) - 2 * _MAX_BYTES), -1):
            # The second part of a cut character shows U+FFFD of its own, so the halves are longer than the whole;
            # decoders that drop a space at the start of what they decode drop one between the halves.
            halves = [decode_text(self._tokenizer, half) for half in (settled[:cut], settled[cut:])]
            if text in ("".join(halves), " ".join(halves)):
                return cut
        return None

    def _past_stops(self, chunk: str, *, at_end: bool) -> str:
        """What of the held text and `chunk` may be given out."""
        text = self._held + chunk
        found = start_of_stop(text, self._stops.strings)
        if found is not None:
            self.stopped, self._held = True, ""
            return text[:found]
        held = 0 if at_end else _possible_start(text, self._stops.strings)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def start_of_stop(text: str, strings: Sequence[str]) -> int | None:
    """Where the stop string begins that is complete first; of two that end together, the longer."""
    places = [(start + len(stop), start) for stop in strings if (start := text.find(stop)) >= 0]
    return min(places)[1] if places else None


def _possible_start(text: str, strings: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    longest = max(map(len, strings), default=0) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in strings):
            return length
    return 0


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    """Special tokens by name."""
    if tokenizer.is_fast:
        return {str(token): index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return dict(zip(map(str, tokenizer.all_special_tokens), tokenizer.all_special_ids, strict=True))


def _byte_tokens(tokenizer: Any) -> dict[int, int]:
    """Byte values by id, of a vocabulary whose decoder joins tokens such as <0xE2> to characters."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    # A missing name gives the id of the unknown token, or None.
    found = {
        index: byte
        for byte, (name, index) in enumerate(zip(names, tokenizer.convert_tokens_to_ids(names), strict=True))
        if index is not None and tokenizer.convert_ids_to_tokens(index) == name
    }
    letter = next((index for index, byte in found.items() if chr(byte).isascii() and chr(byte).isalnum()), None)
    if letter is not None and decode_text(tokenizer, [letter]) != chr(found[letter]):
        return {}
    return found
