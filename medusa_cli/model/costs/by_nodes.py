"""What a step costs on this machine by the nodes it verifies: measured once for a model and a runner, and remembered.

Shape letters: B rows, N nodes.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

import torch
from torch import Tensor

from medusa_cli.contracts import Context, Draft
from medusa_cli.model.clock import now
from medusa_cli.model.costs.kept import Costs, keep, kept, key_of, machine_of
from medusa_cli.model.target import Target
from medusa_cli.trees.build import never_falling
from medusa_cli.trees.tree import TokenTree
from medusa_cli.util.busy import Meter
from medusa_cli.util.timing import Times, interleaved, was_disturbed, widest_spread

NODE_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
CONTEXT = 128
ROUNDS, PATIENCE_S = 7, 5.0  # rounds over all sizes, as long as patience lasts

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measured:
    """What steps took, least of all rounds, by nodes; and how far that can be trusted.

    spread      by how much of the least the middle round took longer, at the size that was hit most
    disturbed   others had the processor meanwhile
    """

    seconds: dict[int, float]
    spread: float
    disturbed: bool


def step_costs(target: Target) -> Costs:
    """Seconds of a step of one row by nodes verified, the root included: remembered, else measured now."""
    return kept(key_of(target)) or measure_and_keep(target)


def measure_and_keep(target: Target) -> Costs:
    """Measure now, whatever is known, and remember it; what was disturbed, for a short while only."""
    logger.info("measuring what a step costs on this machine: some seconds")
    found = measure(target)
    if found.disturbed:
        logger.warning("what a step costs was measured, and will be again: the machine was busy or changed its speed")
    costs = Costs(
        seconds=found.seconds,
        laps={},
        spread=found.spread,
        disturbed=found.disturbed,
        target=target.name,
        fingerprint=target.fingerprint,
        runner=target.identity.runner,
        attention=target.identity.attention,
        dtype=target.dtype_name,
        device=str(target.device),
        machine=machine_of(target.device),
        threads=torch.get_num_threads(),
        measured=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    keep(costs, key_of(target))
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
) -> Measured:
    """What steps of one row cost now. Sizes are interleaved, so that a busy moment of the machine hits them alike.

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

    def step(draft: Draft, guesses: bool) -> None:
        if propose is not None and guesses:
            propose(around)
        target.verify(draft, cache)

    drafts = {count: Draft(tokens[:, :count], TokenTree.chain(count - 1)) for count in counts}
    work = {count: partial(step, draft, count > 1) for count, draft in drafts.items()}
    meter = Meter()
    times = interleaved(work, lambda: now(target.device), rounds=rounds, patience_s=patience_s)
    spread = widest_spread(times)
    return Measured(curve_of(times), spread, was_disturbed(spread, meter))


def random_ids(target: Target, count: int) -> Tensor:
    """Ids [1, count], the same each time: what others draw must not depend on whether anything was measured."""
    return torch.randint(target.real_vocab, (1, count), generator=torch.Generator().manual_seed(0)).to(target.device)


def curve_of(times: Mapping[int, Times]) -> dict[int, float]:
    """The least of each size, made a curve that never falls: what is left of noise is as likely in either neighbour."""
    counts = sorted(times)
    return dict(zip(counts, never_falling([times[count].least for count in counts]), strict=True))
