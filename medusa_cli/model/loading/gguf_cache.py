"""Cache of converted GGUF files: where a user's file gets its copy, named by what the file holds."""

import logging
import re
import shutil
from functools import cache
from pathlib import Path

from medusa_cli.util.paths import cache_home
from medusa_cli.util.sealed import sha256_of

# a copy holds float32: of four bits and their scales that makes about eight times as much
GROWTH = 8
MOST_OF_FREE = 0.5

logger = logging.getLogger(__name__)


def copy_of(path: Path) -> Path | None:
    """The folder this file is converted into once; None where the disk has no room to spare for it.

    Named by the file's whole content, so that another file under the same name is another model.
    """
    home = cache_home() / "models"
    there = next(part for part in (home, *home.parents) if part.exists())
    needed, free = GROWTH * path.stat().st_size, shutil.disk_usage(there).free
    named = re.sub(r"[^\w.+-]", "_", path.stem)
    name = f"{named}-{_sha256_of(path, path.stat().st_mtime_ns)[:12]}"
    if not (home / name).exists() and needed > MOST_OF_FREE * free:
        sizes = f"a copy may take {needed / 1e9:.0f} GB, and {free / 1e9:.0f} GB are free"
        logger.info("%s is converted at every start: %s", path, sizes)
        return None
    return home / name


@cache
def _sha256_of(path: Path, _: int) -> str:
    """Of the whole file, once for each time it was changed."""
    return sha256_of(path)
