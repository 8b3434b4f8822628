"""Folders with checksums: made beside, named when they are whole, and looked at before anything in them is used.

A damaged library or program ends the process that runs it, so it is found out before.
"""

import hashlib
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from medusa_cli.util.files import sync, write_atomically
from medusa_cli.util.paths import OURS_ALONE, is_writable_by_others, make_private, why_not_private
from medusa_cli.util.plain_json import parse_json

SUMS = "sums.json"
LONGEST_S = 24 * 3600.0  # that making one can take; what is older was left by a kill
_MOST_BYTES = 1_000_000  # of the list itself


@dataclass(frozen=True)
class _Sum:
    """What a file was when it was written: bytes, the time in nanoseconds, and a checksum."""

    size: int
    modified: int
    sha256: str

    @classmethod
    def of(cls, file: Path) -> "_Sum":
        found = file.stat()
        return cls(found.st_size, found.st_mtime_ns, sha256_of(file))


def make(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fill a new folder, for this user alone, and give it the name. Raises OSError, and whatever `fill` raises.

    A kill at any moment leaves what was there before. Of several that make the same one, the first wins; one that is
    there and isn't whole is replaced.
    """
    make_private(folder.parent)
    sweep(folder, LONGEST_S)
    # a process id would not do as a name: containers that share a home share those too
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
        made = Path(scratch) / "made"
        made.mkdir(OURS_ALONE)
        fill(made)
        seal(made)
        _give_name(made, folder, Path(scratch))
    sync(folder.parent)


def sweep(folder: Path, seconds: float = 0.0) -> None:
    """Remove what killed makers of this folder left beside it, if it was left alone for so long."""
    for left in folder.parent.glob(f".{folder.name}.*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime >= seconds:
                shutil.rmtree(left, ignore_errors=True)


def seal(folder: Path) -> None:
    """Write the list of what is in the folder, and force all of it to the disk. Raises OSError."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file != folder / SUMS]
    for each in (*files, *(inner for inner in folder.rglob("*") if inner.is_dir())):
        each.chmod(OURS_ALONE if each.is_dir() else 0o600)
        sync(each)
    _write(folder, {file.relative_to(folder).as_posix(): _Sum.of(file) for file in files})


def fault_in(folder: Path, *, trust_times: bool = False) -> str | None:
    """What keeps a sealed folder from being used, in words: damage, or that others may have written it. None: nothing.

    trust_times   a file of the size and the time that it was sealed with isn't read
    """
    try:
        if not folder.is_dir():
            return f"{folder} is no folder" if folder.exists() else f"{folder} is not there"
        if fault := _open_to_others(folder) or _open_to_others(folder / SUMS):
            return fault
        sums = _sums_in(folder)
        faults = (_fault_of(folder / name, wanted, trust_times) for name, wanted in sums.items())
        fault = next(filter(None, faults), None)
        if fault is None and trust_times:
            _note_times(folder, sums)
        return fault
    except OSError as error:
        return f"{error.filename or folder} can't be read: {error.strerror}"
    except (ValueError, TypeError, AttributeError):
        return f"{folder / SUMS} is damaged"


def sha256_of(file: Path) -> str:
    """The file's checksum. Raises OSError."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _give_name(made: Path, folder: Path, aside: Path) -> None:
    """Rename, unless a whole one has the name; a damaged one goes aside. Others may be doing the same."""
    for attempt in range(3):
        try:
            made.rename(folder)
            return
        except OSError:
            if fault_in(folder) is None:
                return
            with suppress(FileNotFoundError):
                folder.rename(aside / f"damaged-{attempt}")
    made.rename(folder)


def _note_times(folder: Path, sums: Mapping[str, _Sum]) -> None:
    """Whole files of other times, as copies are, need no reading next time."""
    now = {name: replace(each, modified=(folder / name).stat().st_mtime_ns) for name, each in sums.items()}
    if now != sums:
        with suppress(OSError):
            _write(folder, now)


def _write(folder: Path, sums: Mapping[str, _Sum]) -> None:
    """The list of a folder, for this user alone."""
    write_atomically(folder / SUMS, json.dumps({name: vars(each) for name, each in sums.items()}, indent=2) + "\n")
    (folder / SUMS).chmod(0o600)


def _sums_in(folder: Path) -> dict[str, _Sum]:
    """The list of a folder. Raises OSError, and ValueError, TypeError or AttributeError for anything else."""
    file = folder / SUMS
    if file.stat().st_size > _MOST_BYTES:
        raise ValueError("too long for a list of files")
    content: dict[str, dict[str, Any]] = parse_json(file.read_bytes())
    sums = {name: _Sum(**each) for name, each in content.items()}
    if not sums or any(Path(name).is_absolute() or ".." in Path(name).parts for name in sums):
        raise ValueError("names nothing in the folder")
    return sums


def _fault_of(file: Path, wanted: _Sum, trust_times: bool) -> str | None:
    """What is wrong with a file, in words."""
    try:
        found = file.lstat()
    except FileNotFoundError:
        return f"{file} is missing"
    if not stat.S_ISREG(found.st_mode):
        return f"{file} is no file"
    if fault := _open_to_others(file):
        return fault
    if found.st_size != wanted.size:
        return f"{file} is damaged: it has {found.st_size} bytes, not {wanted.size}"
    if (trust_times and found.st_mtime_ns == wanted.modified) or sha256_of(file) == wanted.sha256:
        return None
    return f"{file} is damaged: its checksum differs"


def _open_to_others(path: Path) -> str | None:
    """As `why_not_private`, and what is run must not be writable to others even where they can't come to it."""
    if fault := why_not_private(path):
        return fault
    return f"others may write to {path}" if hasattr(os, "geteuid") and is_writable_by_others(path.lstat()) else None
