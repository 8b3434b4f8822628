"""Files that only this user can have written: what others may have changed is neither run nor believed."""

import os
import stat
from pathlib import Path

from medusa_cli.util.paths import belongs_to_us, say_once, why_not_private


def is_private(path: Path) -> bool:
    """Whether nobody but this user and root can have put there what is at this path. If not, a line says so, once.

    True as well where nothing is: whoever reads it finds that out.
    """
    fault = why_not_private(path) or why_not_private(Path(os.path.realpath(path)))
    if fault is not None:
        say_once(f"{path} isn't used: {fault}")
    return fault is None


def read_private(file: Path) -> bytes | None:
    """What is in a file that is private; None when it isn't there, can't be read, is a link, or isn't private.

    Whose the file is, is asked of the open file: another can't take its place in between.
    """
    if not is_private(file):
        return None
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        with open(file, "rb", opener=lambda name, _: os.open(name, flags)) as stream:
            found = os.fstat(stream.fileno())
            return stream.read() if stat.S_ISREG(found.st_mode) and belongs_to_us(found) else None
    except (OSError, ValueError):
        return None
