"""What a step costs on this machine, by the number of nodes it verifies.

Shape letters: B rows, N nodes, H hidden.
"""

import statistics
import time
from collections.abc import Sequence

import torch

from medusa_cli.contracts import Context, Draft, Drafter
from medusa_cli.target.model import Target
from medusa_cli.trees.tree import TokenTree

# every size up to 8: kernels work on a few rows at a time, and one node more can cost as much as four before it
NODE_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 24, 32, 48, 64)


@torch.inference_mode()
def measure_step_cost(
    target: Target, drafter: Drafter, *, max_nodes: int, context: int, repeats: int
) -> dict[int, float]:
    """Median seconds of a step by nodes verified (root included), one row with `context` committed tokens.

    A target of fewer positions is measured with as many as leave room for the nodes.

    Steps of all sizes are interleaved, so that a busy moment of the machine hits them alike. Every size but 1 also
    pays for the drafter: that is what a plain step saves.
    """
    counts = [count for count in NODE_COUNTS if count <= max_nodes]
    if target.context_limit is not None:
        context = max(1, min(context, target.context_limit - counts[-1]))
    tokens = torch.randint(0, target.real_vocab, (1, max(context, counts[-1])), device=target.device)
    cache = target.new_cache(1, context + counts[-1])
    seen = target.prefill([tokens[0, :context].tolist()], cache)
    around = Context([[]], tokens[:, 0], seen.hidden_BNH[:, 0])
    drafts = {count: Draft(tokens[:, :count], TokenTree.chain(count - 1)) for count in counts}
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(repeats + 1):
        for count, draft in drafts.items():
            begun = _now(target)
            if count > 1:
                drafter.propose(around)
            target.verify(draft, cache)
            seconds[count].append(_now(target) - begun)
    # The first round warms up: allocations and kernels chosen once.
    return {count: statistics.median(times[1:]) for count, times in seconds.items()}


@torch.inference_mode()
def measure_drafting(target: Target, drafters: Sequence[Drafter], *, repeats: int) -> list[float]:
    """Median seconds of a proposal by each drafter, interleaved."""
    root_B = torch.zeros(1, dtype=torch.long, device=target.device)
    hidden_BH = torch.randn(1, target.hidden_size, dtype=target.dtype, device=target.device)
    around = Context([[0]], root_B, hidden_BH)
    seconds: list[list[float]] = [[] for _ in drafters]
    for _ in range(repeats + 1):
        for drafter, times in zip(drafters, seconds, strict=True):
            begun = _now(target)
            drafter.propose(around)
            times.append(_now(target) - begun)
    return [statistics.median(times[1:]) for times in seconds]


def _now(target: Target) -> float:
    """A clock that waits for the device."""
    if target.device.type != "cpu":
        torch.accelerator.synchronize(target.device)
    return time.perf_counter()
