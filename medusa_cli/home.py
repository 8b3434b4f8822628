"""Where medusa keeps what it makes once: converted models, compiled code, checks and measurements; and what ~ means."""

import os
from pathlib import Path


def cache_home() -> Path:
    """MEDUSA_HOME, or medusa/ in the user's cache folder."""
    if home := os.environ.get("MEDUSA_HOME"):
        return expanded(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or expanded("~/.cache")) / "medusa"


def expanded(path: str | Path) -> Path:
    """The path with ~ put in full; as it is when it names a user this machine doesn't have."""
    return Path(os.path.expanduser(path))
