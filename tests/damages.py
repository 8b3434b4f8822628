"""What disks, kills and hands do to a file."""

import os
from collections.abc import Callable
from pathlib import Path


def flip_a_bit(file: Path) -> None:
    """In the middle, where a program has its code."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def replace_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "empty": lambda file: os.truncate(file, 0),
    "missing": lambda file: file.unlink(),
    "a bit flipped": flip_a_bit,
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"more"),
    "a folder": replace_by_folder,
}
