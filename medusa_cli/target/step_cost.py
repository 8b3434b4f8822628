"""What a step costs on this machine by the nodes it verifies: measured once for a model and a runner, and remembered.

Shape letters: B rows, N nodes.
"""

import hashlib
import json
import logging
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

import medusa_cli
from medusa_cli.atomic import write_atomically
from medusa_cli.contracts import Draft
from medusa_cli.home import cache_home
from medusa_cli.target.model import Target
from medusa_cli.trees.tree import TokenTree

NODE_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
CONTEXT = 128
ROUNDS, PATIENCE_S = 7, 5.0  # rounds over all sizes, as long as patience lasts

logger = logging.getLogger(__name__)


def step_costs(target: Target) -> dict[int, float]:
    """Median seconds of a step of one row by nodes verified, the root included."""
    file = cache_home() / "costs" / f"{_key(target)}.json"
    costs = _remembered(file)
    if costs is None:
        logger.info("measuring what a step costs on this machine, once: some seconds")
        costs = measure(target)
        with suppress(OSError):  # a home that can't be written to costs the same seconds again
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, json.dumps(costs) + "\n")
    return costs


@torch.inference_mode()
def measure(target: Target, counts: Sequence[int] = NODE_COUNTS) -> dict[int, float]:
    """As `step_costs`, now. Sizes are interleaved, so that a busy moment of the machine hits them alike."""
    limit = target.context_limit
    context = CONTEXT if limit is None else max(1, min(CONTEXT, limit - counts[-1]))
    tokens = torch.randint(0, target.real_vocab, (1, max(context, counts[-1])), device=target.device)
    cache = target.new_cache(1, context + counts[-1])
    target.prefill([tokens[0, :context].tolist()], cache)
    drafts = {count: Draft(tokens[:, :count], TokenTree.chain(count - 1)) for count in counts}
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    started = time.perf_counter()
    for round_ in range(ROUNDS + 1):
        for count, draft in drafts.items():
            begun = _now(target)
            target.verify(draft, cache)
            seconds[count].append(_now(target) - begun)
        if round_ and time.perf_counter() - started > PATIENCE_S:
            break
    # The first round warms up: allocations and kernels chosen once.
    return {count: statistics.median(times[1:]) for count, times in seconds.items()}


def _key(target: Target) -> str:
    """A hash of all that costs depend on, as far as it can be told."""
    identity = target.identity
    parts = (
        medusa_cli.__version__,
        torch.__version__,
        target.config.to_json_string(),
        identity.runner,
        identity.attention,
        target.dtype_name,
        _machine(target.device),
        str(torch.get_num_threads()),
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def _machine(device: torch.device) -> str:
    """The processor or GPU: homes may be shared."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line for line in lines if line.startswith("model name")), str(device))


def _remembered(file: Path) -> dict[int, float] | None:
    """What an earlier run measured; None when there is nothing, or nothing of use."""
    try:
        found = {int(count): float(seconds) for count, seconds in json.loads(file.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return found if 1 in found and all(0 < seconds < float("inf") for seconds in found.values()) else None


def _now(target: Target) -> float:
    """A clock that waits for the device."""
    if target.device.type != "cpu":
        torch.accelerator.synchronize(target.device)
    return time.perf_counter()
