"""From a recipe to a folder of heads, resumable at every stage.

written/         what the target wrote or read, with its hidden states      (data stage)
checkpoints/     the newest states of the training run                      (training)
heads.safetensors heads.json tree.json accuracy.json train.jsonl provenance.json README.md
"""

import json
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from medusa_cli import __version__
from medusa_cli.drafters.medusa import MedusaDrafter
from medusa_cli.errors import TrainingError
from medusa_cli.formats.atomic import write_atomically
from medusa_cli.formats.native import write_heads
from medusa_cli.heads.medusa import MedusaConfig, MedusaHeads
from medusa_cli.produce.cost import measure_step_cost
from medusa_cli.produce.given import read_given
from medusa_cli.produce.write import OnProgress, write_self
from medusa_cli.recipe import Recipe
from medusa_cli.target.model import Target
from medusa_cli.train.card import FittedTree, Provenance, write_card
from medusa_cli.train.checkpoint import Checkpoints, RunIdentity, TrainLog, recipe_hash
from medusa_cli.train.corpus import Corpus, Examples, choose_draft_ids
from medusa_cli.train.loop import Event, Outlets, Reporter, Sets, train
from medusa_cli.train.measure import Measurement, fit_tree_joint, measure
from medusa_cli.trees.build import choose_size
from medusa_cli.trees.files import write_tree
from medusa_cli.trees.tree import TokenTree

NUM_RANKS = 32
COST_CONTEXT, COST_REPEATS = 256, 7
# Settings that may change between the data stage and a later run on the same data.
FREE_DATA = {"num_samples", "rows", "workers", "held_out"}


@dataclass(frozen=True)
class Hooks:
    """How a run is watched: the data stage's progress, the training's events, plain sentences, an outside reporter."""

    on_data: OnProgress
    on_event: Callable[[Event], None]
    say: Callable[[str], None]
    reporter: Reporter | None = None


@dataclass(frozen=True)
class Made:
    """What a finished run has to show."""

    folder: Path
    measurement: Measurement
    tree: TokenTree
    expected_tokens: float
    predicted_speedup: float
    data: dict[str, int]


def claim_folder(recipe: Recipe, fingerprint: str, *, resume: bool) -> Path:
    """The run folder, marked as this recipe's. Raises TrainingError when it is another run's, or needs `resume`."""
    folder = Path(recipe.output_dir)
    mark = folder / "run.json"
    wanted = {
        "fingerprint": fingerprint,
        "seed": recipe.seed,
        "data": recipe.data.model_dump(mode="json", exclude=FREE_DATA),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if mark.is_file():
            _check_same(json.loads(mark.read_text(encoding="utf-8")), wanted, folder)
        else:
            write_atomically(mark, json.dumps(wanted, indent=2) + "\n")
    except OSError as error:
        raise TrainingError(f"can't write to {folder}: {error.strerror}", "choose another --output-dir") from error
    identity = RunIdentity(recipe_hash(recipe), fingerprint)
    if not resume and Checkpoints(folder, identity).exists():
        raise TrainingError(
            f"{folder} holds a run that was started before",
            "go on with --resume-from-checkpoint, or choose another --output-dir",
        )
    return folder


def _check_same(found: dict[str, Any], wanted: dict[str, Any], folder: Path) -> None:
    differing = [name for name in ("fingerprint", "seed") if found.get(name) != wanted[name]]
    theirs = found.get("data", {})
    differing += [f"data.{name}" for name, value in wanted["data"].items() if theirs.get(name) != value]
    if differing:
        raise TrainingError(
            f"{folder} is a run with other settings: {', '.join(differing)}",
            "choose another --output-dir, or go back to the settings it was started with",
        )


def make_heads(recipe: Recipe, target: Target, folder: Path, hooks: Hooks, command: str) -> Made:
    """The whole path. Raises the errors of its stages; what is finished stays, and the same call goes on from it."""
    written = folder / "written"
    if recipe.data.dataset == "self":
        store, warning = write_self(recipe, target, written, hooks.on_data), None
    else:
        store, warning = read_given(recipe, target, written, hooks.on_data)
    if warning:
        hooks.say(f"warning: {warning}")
    corpus = Corpus.open(store)
    heads, sets = _prepare(recipe, target, corpus, hooks)
    identity = RunIdentity(recipe_hash(recipe), target.fingerprint)
    outlets = Outlets(hooks.on_event, TrainLog(folder), hooks.reporter)
    train(heads, sets, recipe.train, recipe.seed, Checkpoints(folder, identity), outlets)
    heads = heads.eval().requires_grad_(False)
    write_heads(heads, folder)
    return _measure_and_fit(recipe, target, folder, (heads, sets, corpus), hooks, command)


def _prepare(recipe: Recipe, target: Target, corpus: Corpus, hooks: Hooks) -> tuple[MedusaHeads, Sets]:
    """Fresh heads over the draft vocabulary, and the examples on both sides of the split."""
    split = corpus.split(recipe.data.held_out, recipe.seed)
    draft_ids = choose_draft_ids(corpus, split.train, size=recipe.heads.draft_vocab, real_vocab=target.real_vocab)
    config = MedusaConfig(
        num_heads=recipe.heads.num_heads,
        num_layers=recipe.heads.num_layers,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab=len(draft_ids),
        own_output=recipe.heads.own_output,
        output_bias=target.output_bias is not None,
        sees_root=recipe.heads.sees_root,
        target_name=target.name,
        target_fingerprint=target.fingerprint,
    )
    heads = MedusaHeads.fresh(config, draft_ids, target.output_weight.float(), target.output_bias)
    sets = Sets(*(Examples.of(corpus, part, draft_ids, config.num_heads) for part in (split.train, split.held_out)))
    covered = sets.train.coverage()[0]
    hooks.say(
        f"{len(sets.train):,} places to learn from, {len(sets.held_out):,} held out; "
        f"the draft vocabulary of {len(draft_ids):,} covers {covered:.1%} of the target's tokens"
    )
    return heads, sets


def _measure_and_fit(
    recipe: Recipe, target: Target, folder: Path, parts: tuple[MedusaHeads, Sets, Corpus], hooks: Hooks, command: str
) -> Made:
    """Accuracies on held-out text, the step's cost here, the tree that pays most, and the files that say so."""
    heads, sets, corpus = parts
    source = "held-out text of the training data, written by the target"
    hooks.say("measuring accuracies on held-out text, and what a step costs on this machine")
    measurement = measure(heads, sets.held_out, num_ranks=NUM_RANKS, chunk=recipe.train.loss_chunk, source=source)
    measurement.save(folder)
    drafting = heads.to(dtype=target.dtype)
    widest = MedusaDrafter(drafting, TokenTree.chain(heads.config.num_heads))
    costs = measure_step_cost(
        target, widest, max_nodes=recipe.tree.max_size + 1, context=COST_CONTEXT, repeats=COST_REPEATS
    )
    order = fit_tree_joint(measurement.paths, recipe.tree.max_size)
    gains = [1.0]
    for path in order:
        gains.append(gains[-1] + measurement.paths.probability(path))
    best = choose_size(gains, costs, recipe.tree.max_size)
    size = min(best.size if recipe.tree.size is None else recipe.tree.size, len(order))
    tree = TokenTree.from_paths(order[:size])
    cost_facts = {"step_cost": {str(nodes): seconds for nodes, seconds in costs.items()}}
    write_tree(folder / "tree.json", tree, {"expected_tokens": gains[size], **cost_facts})
    _add_cost(folder / "accuracy.json", cost_facts)
    data = {
        "samples": corpus.num_samples,
        "tokens written": int(corpus.supervised_T.sum()) + _prompt_tokens(folder / "written" / "prompts.jsonl"),
        "tokens supervised": int(corpus.supervised_T.sum()),
    }
    provenance = Provenance(
        base=target.name,
        revision=recipe.target.revision,
        fingerprint=target.fingerprint,
        licence=target.identity.licence,
        command=command,
        recipe=recipe.model_dump(mode="json", exclude={"output_dir"}),
        data=data,
        versions={"medusa-heads": __version__, "python": platform.python_version()}
        | {name: version(name) for name in ("torch", "transformers")},
    )
    write_card(folder, provenance, measurement.accuracy, FittedTree(tree.paths(), gains[size]))
    speedup = choose_size(gains[: size + 1], costs, size).speedup if size else 1.0
    return Made(folder, measurement, tree, gains[size], speedup, data)


def _add_cost(file: Path, facts: dict[str, Any]) -> None:
    """The measured step cost stands beside the accuracies, for inspect-tree."""
    content = json.loads(file.read_text(encoding="utf-8"))
    write_atomically(file, json.dumps({**content, **facts}) + "\n")


def _prompt_tokens(file: Path) -> int:
    """Tokens of the prompts the target wrote for itself; 0 when they came from elsewhere."""
    if not file.exists():
        return 0
    with file.open(encoding="utf-8") as rows:
        return sum(json.loads(row)["tokens"] for row in rows)
