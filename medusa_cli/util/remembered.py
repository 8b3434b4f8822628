"""Facts kept between runs: self-checks, costs of steps, choices of `auto`. One file each, under the cache home.

A fact belongs to a key: all that it depends on (weights, machine, threads, dtype, versions), by name. It is found again
under that very key alone, and checked when it is read. A fact that was measured in a busy moment is believed for a
short while only; whoever learns better later corrects it (`revise`).
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Generic, TypeVar

from medusa_cli.util.files import write_atomically
from medusa_cli.util.paths import cache_home
from medusa_cli.util.plain_json import parse_json
from medusa_cli.util.trusted import read_private

T = TypeVar("T")
Key = Mapping[str, str]
Read = Callable[[Any], T]

FRESH = timedelta(minutes=10)  # a fact from a busy moment: it saves the next start from waiting, and rules no longer
_NO_FACT = (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError)


@dataclass(frozen=True)
class Fact(Generic[T]):
    """What is remembered under a key.

    at          when it was found out
    disturbed   in a busy moment: true for now, and not for long
    """

    key: Key
    value: T
    at: datetime
    disturbed: bool = False

    @property
    def age(self) -> timedelta:
        """How long ago it was found out."""
        return datetime.now(UTC) - self.at

    @property
    def holds(self) -> bool:
        """Whether it may still be believed."""
        return not self.disturbed or timedelta(0) <= self.age <= FRESH


def recall(kind: str, key: Key, read: Read[T]) -> Fact[T] | None:
    """The fact of this kind under this key; None when there is none that holds.

    read   takes the value's JSON, and raises ValueError, TypeError, KeyError or AttributeError for anything else
    """
    fact = _fact(_file(kind, key), read)
    return fact if fact is not None and dict(fact.key) == dict(key) and fact.holds else None


def remember(kind: str, key: Key, value: Mapping[str, Any], *, disturbed: bool = False) -> None:
    """Keep a fact. A home that takes no files costs the same work again, and no error."""
    _write(_file(kind, key), Fact(key, value, datetime.now(UTC), disturbed))


def _write(file: Path, fact: Fact[Mapping[str, Any]]) -> None:
    at = fact.at.isoformat(timespec="seconds")
    text = json.dumps({"key": dict(fact.key), "value": dict(fact.value), "at": at, "disturbed": fact.disturbed})
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(file, text + "\n")
        file.chmod(0o600)  # what others may write isn't read


def revise(kind: str, key: Key, read: Read[T], change: Callable[[Fact[T]], Mapping[str, Any] | None]) -> None:
    """Correct what is kept now, which another process may have corrected meanwhile. Nothing is made that isn't there,
    and nothing becomes younger or surer by it.

    change   from the fact as it is to its new value; None forgets it
    """
    fact = _fact(_file(kind, key), read)
    if fact is None or dict(fact.key) != dict(key):
        return
    value = change(fact)
    if value is None:
        forget(kind, key)
    else:
        _write(_file(kind, key), Fact(key, value, fact.at, fact.disturbed))


def forget(kind: str, key: Key) -> None:
    """Find it out again next time."""
    with suppress(OSError):
        _file(kind, key).unlink(missing_ok=True)


def every(kind: str, read: Read[T]) -> Iterator[Fact[T]]:
    """All facts of a kind that hold, whatever they are about; the newest first."""
    found = (_fact(file, read) for file in sorted(folder(kind).glob("*.json")))
    yield from sorted((fact for fact in found if fact and fact.holds), key=lambda fact: fact.at, reverse=True)


def folder(kind: str) -> Path:
    """Where facts of a kind are kept."""
    return cache_home() / "remembered" / kind


def _file(kind: str, key: Key) -> Path:
    text = json.dumps(dict(sorted(key.items())))
    return folder(kind) / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def _fact(file: Path, read: Read[T]) -> Fact[T] | None:
    """The fact in a file; None when there is none, or others may write it, or it holds something else."""
    try:
        content = parse_json(read_private(file) or b"")
        key, at, disturbed = content["key"], datetime.fromisoformat(content["at"]), content["disturbed"]
        typed = isinstance(key, dict) and all(isinstance(part, str) for part in key.values())
        if not typed or at.tzinfo is None or not isinstance(disturbed, bool):
            return None
        return Fact(key, read(content["value"]), at, disturbed)
    except _NO_FACT:
        return None
