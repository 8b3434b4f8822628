"""What a step costs on this machine by the tokens before it. The cache is filled with random numbers, not by reading.

A step's time depends on how many keys and values it reads, not on which: so a long context costs nothing to prepare.
Shape letters: B rows, N nodes.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from medusa_cli.contracts import Draft
from medusa_cli.errors import TargetError
from medusa_cli.model.cache import TreeCache
from medusa_cli.model.clock import now
from medusa_cli.model.costs.by_nodes import curve_of, random_ids
from medusa_cli.model.target import Target
from medusa_cli.trees.contexts import ContextCost
from medusa_cli.trees.tree import TokenTree
from medusa_cli.util.timing import interleaved

ROUNDS, PATIENCE_S = 7, 30.0  # rounds over all contexts and sizes, as long as patience lasts


def check_contexts(target: Target, contexts: Sequence[int], most_nodes: int) -> None:
    """Raise TargetError for a context that the model has no positions for."""
    limit = target.context_limit
    if limit is None:
        return
    if max(contexts) > limit:
        raise TargetError(
            f"a context of {max(contexts)} tokens is beyond the {limit} positions of {target.name}",
            f"name contexts up to {limit}",
        )
    if most_nodes >= limit:
        raise TargetError(
            f"{most_nodes} nodes leave no room for a text: {target.name} has {limit} positions", "name a smaller tree"
        )


@torch.inference_mode()
def measure_contexts(
    target: Target,
    contexts: Sequence[int],
    counts: Sequence[int],
    *,
    rounds: int = ROUNDS,
    patience_s: float = PATIENCE_S,
) -> list[ContextCost]:
    """The cost of a step of one row at each context, for each number of nodes. Contexts and counts ascend.

    Everything is interleaved, so that a busy moment of the machine hits all of it alike. Raises TargetError as
    `check_contexts`.
    """
    check_contexts(target, contexts, counts[-1])
    committed = [_committed(target, context, counts[-1]) for context in contexts]
    cache = random_cache(target, max(committed), counts[-1])
    tokens = random_ids(target, counts[-1])
    drafts = {count: Draft(tokens[:, :count], TokenTree.chain(count - 1)) for count in counts}

    def step(held: int, count: int) -> None:
        cache.drop(0)
        cache.commit(slice(0, 1), [held])
        target.verify(drafts[count], cache)

    work: dict[tuple[int, int], Callable[[], object]] = {
        (n, count): partial(step, held, count) for n, held in enumerate(committed) for count in counts
    }
    times = interleaved(work, lambda: now(target.device), rounds=rounds, patience_s=patience_s)
    return [
        ContextCost(context, curve_of({count: times[n, count] for count in counts}), read_bytes(target, cache, held))
        for n, (context, held) in enumerate(zip(contexts, committed, strict=True))
    ]


def _committed(target: Target, context: int, most_nodes: int) -> int:
    """Tokens in the cache: the nodes after them need positions too."""
    limit = target.context_limit
    return context if limit is None else min(context, limit - most_nodes)


@torch.inference_mode()
def random_cache(target: Target, context: int, room: int) -> TreeCache:
    """A cache whose one row holds `context` tokens of random keys and values, with room for `room` nodes after them."""
    cache = target.new_cache(1, context + room)
    target.prefill([[0]], cache)  # layers take heads, width and dtype from the first token
    # a generator of its own: what others draw later must not depend on what was measured
    for layer in cache.layers:
        rng = torch.Generator(layer.keys.device).manual_seed(0)
        layer.keys.normal_(generator=rng)
        layer.values.normal_(generator=rng)
    cache.drop(0)
    cache.commit(slice(0, 1), [context])
    return cache


def read_bytes(target: Target, cache: TreeCache, context: int) -> int:
    """Bytes of keys and values that a step after `context` tokens reads: of windows alone, where attention skips."""
    total = 0
    for layer in cache.layers:
        skips = target.attends_natively and layer.window is not None
        columns = min(context, layer.window) if skips else context
        for store in (layer.keys, layer.values):
            total += columns * store[:, :, 0].numel() * store.element_size()
    return total
