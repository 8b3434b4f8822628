"""Does the cache of a run fit into memory? Asked before the first forward."""

from collections.abc import Sequence
from pathlib import Path

import torch

from medusa_cli.decode.rows import Limits
from medusa_cli.errors import DataError
from medusa_cli.target.cache import BLOCK
from medusa_cli.target.model import Target

_MIB = 2**20


def cache_bytes(
    target: Target, prompts: Sequence[Sequence[int]], limits: Limits, max_rows: int, num_nodes: int
) -> tuple[int, int]:
    """Bytes the cache of a run can grow to, and the columns of a row: the longest text and a tree under it.

    A layer that grows holds the old keys and the new ones for a moment, so one layer counts twice.
    """
    longest = max((len(prompt) + max(0, limits.budget(len(prompt))) for prompt in prompts), default=0)
    columns = -(-(longest + num_nodes) // BLOCK) * BLOCK
    if target.graphed is not None:
        columns = max(columns, target.graphed.columns_for(longest, num_nodes))
    layers = target.num_layers + 1
    return max_rows * columns * target.cache_bytes_per_token * layers // target.num_layers, columns


def check_room(
    target: Target,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    max_rows: int,
    num_nodes: int,
    hint: str = "write fewer at once (--batch-size), or fewer tokens (--max-new-tokens)",
) -> None:
    """Raise DataError, with the numbers, when the cache of a run would not fit into what is free now."""
    needed, columns = cache_bytes(target, prompts, limits, max_rows, num_nodes)
    target.release()  # what earlier texts left behind is free for these
    parts = [free_bytes(device) for device in target.devices]
    free = None if None in parts else sum(part or 0 for part in parts)
    if free is not None and needed > free:
        raise DataError(
            f"{max_rows} texts of up to {columns} tokens at once need {needed // _MIB:,} MiB for keys and values; "
            f"{free // _MIB:,} MiB are free",
            hint,
        )


def free_bytes(device: torch.device) -> int | None:
    """Memory that can be taken on this device; None where nobody can tell."""
    if device.type == "cuda":
        # torch keeps what was freed, for what it makes next
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    told = Path("/proc/meminfo")
    if device.type != "cpu" or not told.exists():
        return None
    for line in told.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
