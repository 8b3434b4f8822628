"""What a step costs on this machine by the nodes it verifies: measured once for a model and a runner, and remembered.

Shape letters: B rows, N nodes.
"""

import hashlib
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import accumulate

import torch
from torch import Tensor

import medusa_cli
from medusa_cli.contracts import Context, Draft
from medusa_cli.target.clock import now
from medusa_cli.target.costs import Costs, keep, kept, machine_of
from medusa_cli.target.model import Target
from medusa_cli.trees.tree import TokenTree

NODE_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
CONTEXT = 128
ROUNDS, PATIENCE_S = 7, 5.0  # rounds over all sizes, as long as patience lasts

logger = logging.getLogger(__name__)


def step_costs(target: Target) -> dict[int, float]:
    """Median seconds of a step of one row by nodes verified, the root included."""
    costs = kept(_key(target)) or measure_and_keep(target)
    return costs.seconds


def measure_and_keep(target: Target) -> Costs:
    """Measure now, whatever is known, and remember it."""
    logger.info("measuring what a step costs on this machine: some seconds")
    costs = Costs(
        seconds=measure(target),
        target=target.name,
        fingerprint=target.fingerprint,
        runner=target.identity.runner,
        dtype=target.dtype_name,
        device=str(target.device),
        machine=machine_of(target.device),
        threads=torch.get_num_threads(),
        measured=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    with suppress(OSError):  # a home that can't be written to costs the same seconds again
        keep(costs, _key(target))
    return costs


@torch.inference_mode()
def measure(
    target: Target,
    counts: Sequence[int] = NODE_COUNTS,
    *,
    context: int = CONTEXT,
    rounds: int = ROUNDS,
    patience_s: float = PATIENCE_S,
    propose: Callable[[Context], object] | None = None,
) -> dict[int, float]:
    """As `step_costs`, now. Sizes are interleaved, so that a busy moment of the machine hits them alike.

    context   committed tokens before the nodes; fewer where the model has fewer positions
    rounds    over all sizes, while patience lasts and one at least
    propose   a drafter's, which every size but 1 then pays for as well: that is what a plain step saves
    """
    limit = target.context_limit
    context = context if limit is None else max(1, min(context, limit - counts[-1]))
    tokens = random_ids(target, max(context, counts[-1]))
    cache = target.new_cache(1, context + counts[-1])
    seen = target.prefill([tokens[0, :context].tolist()], cache)
    around = Context([[]], tokens[:, 0], seen.hidden_BNH[:, 0])
    drafts = {count: Draft(tokens[:, :count], TokenTree.chain(count - 1)) for count in counts}
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    started = time.perf_counter()
    for round_ in range(rounds + 1):
        for count, draft in drafts.items():
            begun = now(target.device)
            if propose is not None and count > 1:
                propose(around)
            target.verify(draft, cache)
            seconds[count].append(now(target.device) - begun)
        if round_ and time.perf_counter() - started > patience_s:
            break
    # The first round warms up: allocations and kernels chosen once.
    return undisturbed({count: statistics.median(times[1:]) for count, times in seconds.items()})


def random_ids(target: Target, count: int) -> Tensor:
    """Ids [1, count], the same each time: what others draw must not depend on whether anything was measured."""
    return torch.randint(target.real_vocab, (1, count), generator=torch.Generator().manual_seed(0)).to(target.device)


def undisturbed(seconds: Mapping[int, float]) -> dict[int, float]:
    """The costs without what they can't be: a step over more nodes could stand in for one that took longer."""
    dearest_first = sorted(seconds, reverse=True)
    least = accumulate((seconds[count] for count in dearest_first), min)
    return dict(sorted(zip(dearest_first, least, strict=True)))


def _key(target: Target) -> str:
    """A hash of all that costs depend on, as far as it can be told."""
    identity = target.identity
    parts = (
        medusa_cli.__version__,
        torch.__version__,
        target.config.to_json_string(),
        target.fingerprint,  # which kernels read the weights depends on their values
        identity.runner,
        identity.attention,
        target.dtype_name,
        machine_of(target.device),
        str(torch.get_num_threads()),
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]
