"""Memory of a run: keys and values, and what the largest forward takes. Asked before the first one."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from medusa_cli.contracts import Drafter
from medusa_cli.decode.rows import Limits
from medusa_cli.errors import DataError
from medusa_cli.model.cache import BLOCK
from medusa_cli.model.prefill import peak_bytes
from medusa_cli.model.target import Target

_MIB = 2**20
LOGITS = 3  # tensors of the size of the logits while tokens are chosen from them
FLOAT = 4


@dataclass(frozen=True)
class Needed:
    """Bytes that a run takes beside the weights at most, and the columns of a row: the longest text, a tree under it.

    cache     keys and values
    forward   the largest forward, over a piece of prompts or over the nodes of a step, and the logits it gives
    """

    cache: int
    forward: int
    columns: int

    @property
    def total(self) -> int:
        """Both are there at once."""
        return self.cache + self.forward


def needed_bytes(
    target: Target,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    max_rows: int,
    num_nodes: int,
    *,
    in_pieces: bool = True,
) -> Needed:
    """What writing after these prompts can grow to, `max_rows` at once, with so many nodes under each root.

    A layer that grows holds the old keys and the new ones for a moment, so one layer counts twice then.

    in_pieces   prompts are read so; else somebody reads them all with one forward
    """
    text = max((len(prompt) + max(0, limits.budget(len(prompt))) for prompt in prompts), default=0)
    held, columns = target.columns_for(text, num_nodes), columns_for(target, text, num_nodes)
    at_first = max((limits.columns_at_first(len(prompt)) for prompt in prompts[:max_rows]), default=0)
    grows = held > 0 or columns > at_first
    layers = target.num_layers + grows
    cache = max_rows * columns * target.cache_bytes_per_token * layers // target.num_layers
    longest = max(map(len, prompts), default=0)
    return Needed(cache, _forward_bytes(target, longest, text, max_rows, num_nodes, in_pieces=in_pieces), columns)


def columns_for(target: Target, text: int, num_nodes: int) -> int:
    """Columns that a row comes to need for a text of so many tokens, with so many nodes under each root."""
    return max(target.columns_for(text, num_nodes), -(-(text + num_nodes) // BLOCK) * BLOCK)


def free_columns(
    target: Target,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    max_rows: int,
    drafter: Drafter,
    *,
    reserved: int = 0,
) -> int | None:
    """Columns, over all rows, that fit into the memory that is free now, beside the largest forward over such texts.

    None where nobody can tell. A layer that takes another shape is there twice for a moment.

    reserved   bytes of it that others will take
    """
    free = _free(target)
    if free is None:
        return None
    longest = max(map(len, prompts), default=0)
    text = max((len(prompt) + max(0, limits.budget(len(prompt))) for prompt in prompts), default=0)
    layers = target.num_layers
    column = target.cache_bytes_per_token * (layers + 1) // layers
    column += len(drafter.taps) * target.hidden_size * target.dtype.itemsize
    forward = _forward_bytes(target, longest, text, max_rows, drafter.size, in_pieces=True)
    return max(0, (free - reserved - forward) // column)


def _forward_bytes(target: Target, longest: int, text: int, max_rows: int, num_nodes: int, *, in_pieces: bool) -> int:
    """The largest forward: over prompts of up to `longest` tokens, or over nodes under texts of up to `text`."""
    memory, nodes = target.forward_memory, num_nodes + 1
    prompt = max(1, longest)
    reading = peak_bytes(memory, max_rows, prompt) if in_pieces else memory.bytes(max_rows, prompt, prompt)
    reading += max_rows * target.vocab_size * LOGITS * FLOAT
    step = memory.bytes(max_rows, nodes, text + num_nodes, wanted=nodes)
    step += max_rows * nodes * target.vocab_size * (LOGITS - 1) * FLOAT
    return max(reading, step)


def check_room(
    target: Target,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    max_rows: int,
    num_nodes: int,
    hint: str = "write fewer at once (--batch-size), or fewer tokens (--max-new-tokens)",
    *,
    in_pieces: bool = True,
) -> None:
    """Raise DataError, with the numbers, when a run would not fit into the memory that is free now."""
    needed = needed_bytes(target, prompts, limits, max_rows, num_nodes, in_pieces=in_pieces)
    free = _free(target)
    if free is not None and needed.total > free:
        raise DataError(
            f"{max_rows} texts of up to {needed.columns} tokens at once need {needed.total // _MIB:,} MiB: "
            f"{needed.cache // _MIB:,} for keys and values, {needed.forward // _MIB:,} for a forward; "
            f"{free // _MIB:,} MiB are free",
            hint,
        )


def _free(target: Target) -> int | None:
    """Bytes on all devices of a target; what earlier texts left behind is free for others."""
    target.release()
    parts = [free_bytes(device) for device in target.devices]
    return None if None in parts else sum(part or 0 for part in parts)


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
