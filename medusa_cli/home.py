"""Where medusa keeps what it makes once: converted models, remembered checks, compiled kernels."""

import os
from pathlib import Path


def cache_home() -> Path:
    """MEDUSA_HOME, or medusa/ in the user's cache folder."""
    if home := os.environ.get("MEDUSA_HOME"):
        return Path(home).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "medusa"
