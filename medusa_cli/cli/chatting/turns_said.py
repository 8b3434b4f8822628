"""What the user says, turn by turn, out of lines that are typed or come from a pipe."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

from medusa_cli.data.conversations import is_text
from medusa_cli.errors import DataError

QUOTES = '"""'
FIRST, MORE = "> ", "… "

ReadLine = Callable[[str], str | None]
"""(what stands before the line) -> the line without its end; None where there is no more"""


@dataclass(frozen=True)
class Said:
    """One turn; `is_command`: one for the program, without its slash."""

    text: str
    is_command: bool = False


def next_turn(read: ReadLine) -> Said | None:
    r"""One turn, or None at the end: a line, lines of which all but the last end with \, or what \"\"\" encloses.

    A line that begins with / is a command, and one that begins with // a turn that begins with /.
    Raises DataError for an enclosed turn that doesn't end, and for what is no text.
    """
    line = read(FIRST)
    if line is None:
        return None
    if line.lstrip().startswith(QUOTES):
        return Said(_checked(_enclosed(line.lstrip().removeprefix(QUOTES), read)))
    lines = []
    while line is not None and line.endswith("\\"):
        lines.append(line[:-1])
        line = read(MORE)
    text = _checked("\n".join([*lines, *([line] if line is not None else [])]))
    if text.startswith("/") and "\n" not in text and not text.startswith("//"):
        return Said(text[1:].strip(), True)
    return Said(text[1:] if text.startswith("//") else text)


def _enclosed(line: str, read: ReadLine) -> str:
    lines: list[str] = []
    following: str | None = line
    while following is not None:
        if following.rstrip().endswith(QUOTES):
            return "\n".join([*lines, following.rstrip().removesuffix(QUOTES)]).strip("\n")
        lines.append(following)
        following = read(MORE)
    raise DataError(f"a turn begins with {QUOTES} and doesn't end with it", f"end it with {QUOTES}")


def _checked(text: str) -> str:
    if not is_text(text):
        raise DataError("the turn is not UTF-8", "give it as UTF-8 text")
    return text


def piped(stream: BinaryIO) -> ReadLine:
    """Lines of a pipe or a file, as they come."""

    def read(_: str) -> str | None:
        line = stream.readline()
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"stdin is not UTF-8 ({error.reason})", "give turns as UTF-8 text") from error
        return text.removesuffix("\n").removesuffix("\r") if line else None

    return read
