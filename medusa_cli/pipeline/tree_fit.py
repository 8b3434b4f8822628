"""From trained heads to what is known of them: accuracies, the step's cost here, and the tree that pays most.

Shape letters: B rows, H hidden.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import torch

from medusa_cli.assemble import in_shape, lay_out_heads
from medusa_cli.config.recipe import Recipe
from medusa_cli.contracts import Context, Drafter
from medusa_cli.errors import TrainingError
from medusa_cli.heads.base import Heads
from medusa_cli.model.clock import now
from medusa_cli.model.costs import by_nodes
from medusa_cli.model.target import Target
from medusa_cli.pipeline.inner_states import read_before
from medusa_cli.train.corpus import Examples
from medusa_cli.train.dynamic_replay import Beliefs, beliefs_at
from medusa_cli.train.measure import Measurement, PathCounts, fit_tree_joint, measure
from medusa_cli.trees.build import GAIN, Choice, StepCost, choose_size, predict
from medusa_cli.trees.dynamic import DynamicShape
from medusa_cli.trees.files import write_tree
from medusa_cli.trees.tree import TokenTree
from medusa_cli.util.timing import interleaved

NUM_RANKS = 32
COST_CONTEXT, COST_REPEATS, DRAFT_REPEATS = 256, 21, 30
COST_SECONDS = 45.0  # rounds over all sizes end by then: a busy machine gets fewer, and nobody waits for minutes
# every size up to 8: kernels work on a few rows at a time, and one node more can cost as much as four before it
COST_NODES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 24, 32, 48, 64)
# dynamic trees: those tried, what is replayed of them, and how near the best is as good
SIZES, FLOORS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32), (0.0, 0.03, 0.05, 0.07, 0.1, 0.14)
BELIEF_RANKS, BELIEF_PLACES, EQUAL = 16, 4096, 0.97
_TYPICAL = DynamicShape(6, 0.05)
OnPart = Callable[[str, int, int], None]
"""(what is being done, how much of it is done, of how much)"""
SOURCE = "the target's own answers to held-out prompts of the training data"


@dataclass(frozen=True)
class Fitted:
    """What was measured of the heads, the trees stored with them, and what they promise on this machine.

    shape and choice are those of the dynamic tree where it promises more; else shape is None.
    """

    measurement: Measurement
    tree: TokenTree
    shape: DynamicShape | None
    choice: Choice

    @property
    def document(self) -> dict[str, Any]:
        """What was found, as commands say it in JSON: accuracies of the best five ranks, and the chosen tree."""
        accuracy, choice = self.measurement.accuracy, self.choice
        return {
            "accuracy": {
                "plain": [row[:5] for row in accuracy.plain],
                "conditional": [row[:5] for row in accuracy.conditional],
            },
            "positions": accuracy.positions,
            "coverage": accuracy.coverage,
            "tree_size": choice.size,
            "dynamic_tree": self.shape.spec if self.shape else None,
            "expected_tokens": choice.expected_tokens,
            "predicted_speedup": choice.speedup,
        }


def fit(
    recipe: Recipe,
    target: Target,
    folder: Path,
    heads: Heads,
    held_out: Examples,
    on_part: OnPart = lambda part, done, total: None,
) -> Fitted:
    """Measure heads and machine, choose the tree, and write accuracy.json and tree.json.

    The heads are in the target's dtype; they end in its layout, as they will draft. Raises TrainingError when the
    folder takes no more files.
    """
    num_ranks = min(NUM_RANKS, heads.config.draft_vocab)
    measurement = measure(
        heads,
        held_out,
        num_ranks=num_ranks,
        chunk=recipe.train.loss_chunk,
        source=SOURCE,
        on_batch=partial(on_part, "measuring accuracies"),
    )
    largest = max(recipe.tree.max_size, recipe.tree.size or 0)
    lay_out_heads(heads, target)
    drafter = in_shape(heads, TokenTree.chain(heads.config.num_heads))
    read_before(target, drafter, COST_CONTEXT)
    counts = [nodes for nodes in COST_NODES if nodes <= largest + 1]
    costs = by_nodes.measure(
        target,
        counts,
        context=COST_CONTEXT,
        rounds=COST_REPEATS,
        patience_s=COST_SECONDS,
        propose=_in_rounds(drafter.propose, len(counts) - 1, partial(on_part, "measuring steps")),
    ).seconds
    tree, choice = _choose(measurement.paths, costs, recipe.tree.size, largest)
    shape: DynamicShape | None = None
    if recipe.tree.size is None and largest:
        drafts = _drafting(target, [drafter, in_shape(heads, _TYPICAL)], repeats=DRAFT_REPEATS)
        ranks = min(BELIEF_RANKS, heads.config.draft_vocab)
        beliefs = beliefs_at(heads, held_out, measurement.ranks, num_ranks=ranks, most=BELIEF_PLACES)
        tried = _promises(beliefs, costs, drafts, largest, partial(on_part, "trying trees"))
        promises = [pair for pair in tried if pair[0].speedup > GAIN]
        choice, shape = _best([(choice, None), *promises])
    measurement.save(folder, costs)
    _write(folder, tree, shape, choice, costs)
    return Fitted(measurement, tree, shape, choice)


def _in_rounds(
    propose: Callable[[Context], object], in_a_round: int, on_round: Callable[[int, int], None]
) -> Callable[[Context], object]:
    """The proposals, which tell at the first of each round how many rounds are over."""
    made = count()

    def proposed(context: Context) -> object:
        rounds, place = divmod(next(made), in_a_round)
        if place == 0:
            on_round(rounds, COST_REPEATS + 1)
        return propose(context)

    return proposed


def _best(promises: Sequence[tuple[Choice, DynamicShape | None]]) -> tuple[Choice, DynamicShape | None]:
    """The most tokens a second. Costs are noisy: of what is as good within EQUAL, the one with the fewest steps."""
    fastest = max(choice.speedup for choice, _ in promises)
    equals = [pair for pair in promises if pair[0].speedup >= fastest * EQUAL]
    return max(equals, key=lambda pair: pair[0].expected_tokens)


def _promises(
    beliefs: Beliefs,
    costs: Mapping[int, float],
    drafts: Sequence[float],
    largest: int,
    on_shape: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[tuple[Choice, DynamicShape]]:
    """What each dynamic shape promises.

    drafts   seconds of a fixed tree's draft, which costs include beyond one node, and of a dynamic one's
    """
    cost, (fixed, dynamic) = StepCost(costs), drafts
    shapes = [DynamicShape(size, floor) for size in SIZES if size <= largest for floor in FLOORS]
    for number, shape in enumerate(shapes, start=1):
        played = beliefs.replay(shape)
        # a step with guesses takes a plain one's time and the draft's at least, whatever noise says
        seconds = sum(
            times * (max(cost.seconds(nodes) - (fixed if nodes > 1 else 0), cost.seconds(1)) + dynamic)
            for nodes, times in played.sizes.items()
        )
        ratio = seconds / played.sizes.total() / cost.seconds(1)
        yield Choice(shape.size, played.tokens, ratio, played.tokens / ratio), shape
        on_shape(number, len(shapes))


def _choose(paths: PathCounts, costs: Mapping[int, float], size: int | None, largest: int) -> tuple[TokenTree, Choice]:
    """The best tree of `size` nodes, or of the size that pays most, and what it promises."""
    order = fit_tree_joint(paths, largest)
    gains = list(accumulate((paths.probability(path) for path in order), initial=1.0))
    if size is None:
        choice = choose_size(gains, costs, largest)
    else:
        size = min(size, len(order))
        choice = predict(size, gains[size], StepCost(costs))
    return TokenTree.from_paths(order[: choice.size]), choice


def _write(
    folder: Path, tree: TokenTree, shape: DynamicShape | None, choice: Choice, costs: Mapping[int, float]
) -> None:
    """tree.json: the best fixed tree, the dynamic shape that is better still, what is promised, and the step costs."""
    dynamic = {"dynamic": shape.spec} if shape else {}
    facts = {**dynamic, "expected_tokens": choice.expected_tokens, "step_cost": dict(costs)}
    try:
        write_tree(folder / "tree.json", tree, facts)
    except OSError as error:
        raise TrainingError(
            f"can't write to {folder}: {error.strerror}", "free some space, then go on with --resume-from-checkpoint"
        ) from error


@torch.inference_mode()
def _drafting(target: Target, drafters: Sequence[Drafter], *, repeats: int) -> list[float]:
    """Seconds of a proposal by each drafter, the least of rounds that are interleaved."""
    root_B = torch.zeros(1, dtype=torch.long, device=target.device)
    hidden_BH = torch.ones(1, target.hidden_size, dtype=target.dtype, device=target.device)
    around = Context([[0]], root_B, hidden_BH)
    for drafter in drafters:
        read_before(target, drafter, COST_CONTEXT)
    work = {number: partial(drafter.propose, around) for number, drafter in enumerate(drafters)}
    return [each.least for each in interleaved(work, lambda: now(target.device), rounds=repeats).values()]
