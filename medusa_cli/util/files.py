"""Replacing a file so that a kill, or a full disk, leaves the old one or the new one and never a part."""

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

_PART = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.medusa-part", re.DOTALL)


def write_atomically(path: Path, data: str | bytes | memoryview) -> None:
    """Write beside `path`, force it to the disk, then give it the name. Raises OSError; text is written as UTF-8.

    A kill or an error at any moment leaves what `path` held before, and after a kill a part beside it (see
    `parts_beside`). Writers of the same file don't meet, in whatever containers they run.
    """
    beside = _part_name(path)
    # never a file or a link that is there: whoever may write to the folder could have put it there
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data.encode() if isinstance(data, str) else data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def is_part_of(part: Path, path: Path) -> bool:
    """Whether `part` has a name that a killed `write_atomically(path, …)` leaves, and nothing else does."""
    found = _PART.fullmatch(part.name)
    return found is not None and part.parent == path.parent and found["name"] == path.name


def parts_beside(path: Path) -> list[Path]:
    """What killed writers of `path` left beside it, and what living ones are writing now. Raises OSError."""
    return sorted(each for each in path.parent.iterdir() if is_part_of(each, path))


def parts_in(folder: Path) -> list[Path]:
    """As `parts_beside`, of whatever file right in the folder."""
    return sorted(each for each in folder.iterdir() if _PART.fullmatch(each.name))


def _part_name(path: Path) -> Path:
    """A new name for what is not whole; a process id would not do: containers that share a folder share those too."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.medusa-part")


def sync(path: Path) -> None:
    """Force a file, or a folder's names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def new_folder(folder: Path, replaced: bool = False) -> Iterator[Path]:
    """A folder to fill that gets the name when all went well; after an error or a kill there is none of that name.

    replaced   a folder of that name gives way, once the new one is whole; else it may only be there when it is empty

    Raises OSError, and whatever filling raises.
    """
    missing = [each for each in reversed(folder.absolute().parents) if not each.exists()]
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.", ignore_cleanup_errors=True) as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            yield made
            sync(made)
            if folder.is_dir():
                folder.rename(Path(scratch) / "before") if replaced else folder.rmdir()
            made.rename(folder)
    except BaseException:
        for each in reversed(missing):
            with suppress(OSError):  # others have put something there
                each.rmdir()
        raise
    sync(folder.parent)
