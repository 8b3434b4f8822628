"""A file of earlier replies of one model, for who copies from them: bounded, and never another model's.

The first line says whose they are; each further one holds the ids of a reply.
"""

import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from medusa_cli.errors import DataError
from medusa_cli.util.files import write_atomically
from medusa_cli.util.plain_json import parse_json

KIND = "medusa-suffix-memory"
MOST = 200_000  # tokens that are kept, the latest
LEAST = 8  # tokens of a reply that is worth it


class SuffixMemory:
    """The replies in a file, to which others are added as they end."""

    @classmethod
    def open(cls, file: Path, fingerprint: str) -> "SuffixMemory":
        """Read the file, or begin one. Raises DataError for a file of another kind or model, or that can't be used."""
        try:
            lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{file} can't be read as a memory of replies: {error}", _OTHER) from error
        if lines:
            _check_head(file, lines[0], fingerprint)
        replies = deque(_reply(file, number, line) for number, line in enumerate(lines[1:], start=2))
        return cls(file, fingerprint, replies)

    def __init__(self, file: Path, fingerprint: str, replies: deque[list[int]]) -> None:
        self._file, self._fingerprint = file, fingerprint
        self.replies = replies
        self._tokens = sum(map(len, replies))
        self._begun = file.exists()

    def add(self, reply: Sequence[int]) -> None:
        """Remember a reply, and forget the oldest beyond the bound. Raises DataError where that can't be written."""
        if len(reply) < LEAST:
            return
        self.replies.append(list(reply))
        self._tokens += len(reply)
        forget = 0
        while self._tokens > MOST and len(self.replies) > 1:
            self._tokens -= len(self.replies.popleft())
            forget += 1
        try:
            if forget or not self._begun:
                self._write_whole()
            else:
                with self._file.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(list(reply)) + "\n")
        except OSError as error:
            raise DataError(f"{self._file} can't be written: {error}", "leave out --suffix-memory") from error

    def _write_whole(self) -> None:
        head = {"kind": KIND, "model": self._fingerprint}
        write_atomically(self._file, "".join(json.dumps(line) + "\n" for line in (head, *self.replies)))
        self._begun = True


_OTHER = "name another file with --suffix-memory"


def _check_head(file: Path, line: str, fingerprint: str) -> None:
    try:
        head = parse_json(line)
        kind, model = head["kind"], head["model"]
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{file} is no memory of replies", _OTHER) from error
    if kind != KIND:
        raise DataError(f"{file} is no memory of replies", _OTHER)
    if model != fingerprint:
        raise DataError(f"{file} holds replies of another model ({model}), and this is {fingerprint}", _OTHER)


def _reply(file: Path, number: int, line: str) -> list[int]:
    try:
        ids = parse_json(line)
    except ValueError:
        ids = None
    if not isinstance(ids, list) or not all(isinstance(token, int) and token >= 0 for token in ids):
        raise DataError(f"{file} is damaged at line {number}", "remove that line, or the file: it is made anew")
    return ids
