"""Replacing a file so that a kill, or a full disk, leaves the old one or the new one and never a part."""

import os
from pathlib import Path


def write_atomically(path: Path, data: str | bytes | memoryview) -> None:
    """Write beside `path`, force it to the disk, then give it the name. Raises OSError; text is written as UTF-8.

    A kill or an error at any moment leaves what `path` held before. Processes that write the same file don't meet.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with beside.open("wb") as stream:
            stream.write(data.encode() if isinstance(data, str) else data)
        sync(beside)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Force a file, or a folder's names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
