"""CPU threads: how many compute, asked for before the libraries that start them are loaded."""

import os
import sys

from medusa_cli.util.busy import cores

_READ_ONCE = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def use_threads(count: int) -> None:
    """Compute with so many, here and in processes started from here. Libraries read it as they are loaded."""
    os.environ |= dict.fromkeys(_READ_ONCE, str(count))
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(count)


def threads_to_share() -> int:
    """Threads that processes side by side may have together: those asked for, else one for each core."""
    asked = os.environ.get(_READ_ONCE[0], "")
    return int(asked) if asked.isdigit() and int(asked) else cores()
