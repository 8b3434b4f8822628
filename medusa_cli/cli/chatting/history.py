"""Turns that were typed, kept from one conversation to the next: a file for this user alone, of a bounded length."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from medusa_cli.util.files import write_atomically
from medusa_cli.util.paths import cache_home, make_private
from medusa_cli.util.plain_json import parse_json

MOST_TURNS = 1000
MOST_CHARACTERS = 20_000  # of a turn: who pastes a book finds it where it came from
OURS_ALONE = 0o600


def history_file() -> Path:
    """Where it is. Raises MedusaError where there is no place to keep anything."""
    return cache_home() / "chat" / "history.jsonl"


class History:
    """Turns in the order they were typed; each is a line of JSON, so that it may have several lines itself."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def read(self) -> Sequence[str]:
        """The latest turns; shortens a file that has grown past them. Raises OSError."""
        try:
            lines = self._file.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return []
        latest = lines[-MOST_TURNS:]
        if len(lines) > 2 * MOST_TURNS:  # what another chat adds meanwhile may be lost, and nothing else
            write_atomically(self._file, "".join(f"{line}\n" for line in latest))
            self._file.chmod(OURS_ALONE)
        return [turn for turn in map(_turn, latest) if turn]

    def add(self, turn: str) -> None:
        """Keep one more. Raises OSError."""
        if len(turn) > MOST_CHARACTERS:
            return
        make_private(self._file.parent)
        handle = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, OURS_ALONE)
        with os.fdopen(handle, "wb") as out:
            out.write((json.dumps(turn) + "\n").encode())


def _turn(line: str) -> str:
    """A line's turn; nothing for a line that is damaged."""
    try:
        turn = parse_json(line)
    except ValueError:
        return ""
    return turn if isinstance(turn, str) else ""
