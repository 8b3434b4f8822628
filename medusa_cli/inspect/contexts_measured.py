"""Steps measured at several contexts, when there is room for them."""

from collections.abc import Sequence

from medusa_cli.decode.memory import check_room
from medusa_cli.decode.rows import Limits
from medusa_cli.model.costs.by_context import check_contexts, measure_contexts
from medusa_cli.model.target import Target
from medusa_cli.trees.contexts import ContextCost


def costs_by_context(target: Target, contexts: Sequence[int], *counts: int) -> list[ContextCost]:
    """What a step over 1 node and over each of `counts` costs after so many tokens; contexts ascend.

    Raises TargetError for a context that the model has no positions for, DataError for one that memory has no room for.
    """
    sizes = sorted({1, *counts})
    check_contexts(target, contexts, sizes[-1])
    check_room(target, [[0] * contexts[-1]], Limits(1), 1, sizes[-1], "name shorter contexts")
    return measure_contexts(target, contexts, sizes)
