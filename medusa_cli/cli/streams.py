"""The process's streams and words: closed, full or in another encoding, and a command goes on all the same."""

import io
import os
import sys
from typing import Any, TypeVar

Word = TypeVar("Word", str, None, str | None)


class _Lossy(io.FileIO):
    """A log that nobody takes any more: what can't be written is dropped, since a text is worth more than its log."""

    def write(self, data: Any) -> int:
        """Write all of it, or none."""
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def open_streams() -> None:
    """Stand in for closed streams, show ? for characters that stdout lacks, drop a log that nobody takes."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    own = sys.__stderr__
    if own is not None and sys.stderr is own:  # of this process itself, and not lent by who calls
        log = io.BufferedWriter(_Lossy(own.fileno(), "w", closefd=False))
        sys.stderr = io.TextIOWrapper(log, own.encoding, "backslashreplace", line_buffering=True)


def settle_stdout() -> None:
    """Write out what stdout still holds; when its reader has gone, drop it, or Python would complain again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def as_written(word: Word) -> Word:
    """A word of the command line as UTF-8 when its bytes are that, whatever the locale calls them; else as it came."""
    try:
        return word if word is None else os.fsencode(word).decode("utf-8")
    except UnicodeError:
        return word
