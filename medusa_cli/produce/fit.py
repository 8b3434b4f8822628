"""From trained heads to what is known of them: accuracies, the step's cost here, and the tree that pays most."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from medusa_cli.assemble import lay_out_heads
from medusa_cli.drafters.medusa import MedusaDrafter
from medusa_cli.errors import TrainingError
from medusa_cli.heads.medusa import MedusaHeads
from medusa_cli.produce.cost import measure_step_cost
from medusa_cli.recipe import Recipe
from medusa_cli.target.model import Target
from medusa_cli.train.corpus import Examples
from medusa_cli.train.measure import Measurement, PathCounts, fit_tree_joint, measure
from medusa_cli.trees.build import Choice, StepCost, choose_size, predict
from medusa_cli.trees.files import write_tree
from medusa_cli.trees.tree import TokenTree

NUM_RANKS = 32
COST_CONTEXT, COST_REPEATS = 256, 7
SOURCE = "the target's own answers to held-out prompts of the training data"


@dataclass(frozen=True)
class Fitted:
    """What was measured of the heads, the tree stored with them, and what it promises on this machine."""

    measurement: Measurement
    tree: TokenTree
    choice: Choice


def fit(recipe: Recipe, target: Target, folder: Path, heads: MedusaHeads, held_out: Examples) -> Fitted:
    """Measure heads and machine, choose the tree, and write accuracy.json and tree.json.

    The heads are in the target's dtype; they end in its layout, as they will draft. Raises TrainingError when the
    folder takes no more files.
    """
    num_ranks = min(NUM_RANKS, heads.config.draft_vocab)
    measurement = measure(heads, held_out, num_ranks=num_ranks, chunk=recipe.train.loss_chunk, source=SOURCE)
    largest = max(recipe.tree.max_size, recipe.tree.size or 0)
    lay_out_heads(heads, target)
    drafter = MedusaDrafter(heads, TokenTree.chain(heads.config.num_heads))
    costs = measure_step_cost(target, drafter, max_nodes=largest + 1, context=COST_CONTEXT, repeats=COST_REPEATS)
    tree, choice = _choose(measurement.paths, costs, recipe.tree.size, largest)
    measurement.save(folder, costs)
    _write(folder, tree, choice, costs)
    return Fitted(measurement, tree, choice)


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


def _write(folder: Path, tree: TokenTree, choice: Choice, costs: Mapping[int, float]) -> None:
    """tree.json, with what it promises and the step costs that decided it."""
    try:
        write_tree(folder / "tree.json", tree, {"expected_tokens": choice.expected_tokens, "step_cost": dict(costs)})
    except OSError as error:
        raise TrainingError(
            f"can't write to {folder}: {error.strerror}", "free some space, then go on with --resume-from-checkpoint"
        ) from error
