"""API keys as they are given: one, or a file of them."""

import os
from collections.abc import Sequence
from pathlib import Path

from medusa_cli.errors import DataError


def keys_of(given: str | None, noun: str = "key") -> Sequence[str]:
    """The key itself, or those in a file. Raises DataError for a file without any."""
    if not given:
        return ()
    file = Path(given)
    if not (os.sep in given or file.is_file()):
        return (given,)
    try:
        keys = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"the file of {noun}s can't be read: {error}", f"name a text file with a {noun} on each line"
        ) from error
    if not keys:
        raise DataError(f"{file} holds no {noun}", "write one on each line")
    return keys
