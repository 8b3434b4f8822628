"""Words that arrive in pieces, broken between words where a terminal's line ends."""

import unicodedata
from collections.abc import Callable


class Flow:
    """One text. A word that may still grow is held back until what follows it is known.

    width   columns there are now; None: lines are left as they are
    """

    def __init__(self, width: Callable[[], int | None]) -> None:
        self._width = width
        self._column = 0
        self._held = ""  # spaces and then the word that grows

    def feed(self, piece: str) -> str:
        """What may be shown now."""
        width = self._width()
        if width is None:
            return self.flush() + piece
        return "".join(self._take(each, width) for each in piece)

    def flush(self) -> str:
        """What is still held."""
        return self._settle(self._width() or 0)

    def _take(self, each: str, width: int) -> str:
        if each == "\n":
            out, self._column = self._settle(width) + each, 0
            return out
        begins = each == " " and not self._held.endswith(" ")
        out = self._settle(width) if begins or _is_wide(each) else ""
        self._held += each
        return out if _columns(self._held) < width else out + self._settle(width)

    def _settle(self, width: int) -> str:
        """The held word, on a line of its own where this one has no room for it.

        What no space stands before goes on where a word longer than a line was broken, or may be broken anywhere.
        """
        word, self._held = self._held, ""
        bare, columns = word.lstrip(" "), _columns(word)
        if bare and bare != word and width and self._column > 0 and self._column + columns > width:
            self._column = _columns(bare)
            return f"\n{bare}"
        self._column += columns
        if width and self._column > width:  # the terminal has broken it
            self._column = (self._column - 1) % width + 1
        return word


def _is_wide(each: str) -> bool:
    """Whether it takes two columns: a character of a writing that breaks its lines anywhere."""
    return unicodedata.east_asian_width(each) in "WF"


def _columns(text: str) -> int:
    return sum(0 if unicodedata.combining(each) else 1 + _is_wide(each) for each in text)
