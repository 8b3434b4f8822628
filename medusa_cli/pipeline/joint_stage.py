"""The second stage of a run whose recipe has a section lora: an adapter of the target learns with the trained heads.

joint/settings.json   the section the stage was started with
joint/checkpoints/    the newest states of heads and adapter
joint/train.jsonl     what happened
joint/held-out/       what the adapted target says to those that are held out, apart for each adapter
adapter/              the adapter, in peft's files; heads.json names its fingerprint
"""

import gc
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from medusa_cli.config.recipe import LoraSettings, Recipe
from medusa_cli.errors import RecipeError, TrainingError
from medusa_cli.heads.base import Heads
from medusa_cli.model.adapter import FOLDER, LearningAdapter, StoredAdapter, adaptable, joined
from medusa_cli.model.loading.gguf_conversion import converted
from medusa_cli.model.loading.huggingface import fetch_config
from medusa_cli.model.loading.load import choose_device, choose_dtype, load_target, load_unchecked
from medusa_cli.model.loading.sources import find_source
from medusa_cli.model.runners.kinds import RUNNERS
from medusa_cli.model.target import Target
from medusa_cli.pipeline.data_context import Stage
from medusa_cli.pipeline.data_stage import own_words
from medusa_cli.pipeline.planning.run_memory import meta_model
from medusa_cli.pipeline.tree_fit import NUM_RANKS, SOURCE
from medusa_cli.train.checkpoint import Checkpoints, RunIdentity, TrainLog, recipe_hash
from medusa_cli.train.corpus import Examples
from medusa_cli.train.joint.events import JointOutlets, JointSettings
from medusa_cli.train.joint.loop import JointTexts, Learners, train_joint
from medusa_cli.train.kl_loss import Predictions, predictions
from medusa_cli.train.loop import Sets
from medusa_cli.train.measure import Measurement, fit_tree_joint, measure
from medusa_cli.train.texts import Texts
from medusa_cli.util.files import write_atomically
from medusa_cli.util.plain_json import parse_json

if TYPE_CHECKING:
    from medusa_cli.pipeline.run import Hooks, Material

JOINT = "joint"
TREE_NODES = 16  # of the tree that says what the heads' guesses are worth before and after
# how a step is computed, not what it learns
_FREE = {"gradient_checkpointing"}


@dataclass(frozen=True)
class Adaptation:
    """What the second stage works with: the run, its target, and heads that have learnt alone in `steps` steps.

    sets   what they learnt from, and the target's own held-out words
    """

    recipe: Recipe
    lora: LoraSettings
    target: Target
    folder: Path
    hooks: "Hooks"
    material: "Material"
    heads: Heads
    sets: Sets
    steps: int

    @property
    def texts(self) -> JointTexts:
        """The samples as whole texts."""
        corpus, prompts = self.material.corpus, self.material.prompts
        held_out = Examples.of(corpus, self.material.held_out, self.heads.draft_ids, self.heads.config.num_heads)
        return JointTexts(Texts(self.sets.train, prompts), Texts(held_out, prompts))


@dataclass(frozen=True)
class Adapted:
    """What the second stage leaves: the adapted target as it decodes, and its own words to measure the heads on.

    alone           what the heads were worth when they had learnt alone
    before, after   what the target said of the held-out texts, and what it says now
    """

    target: Target
    held_out: Examples
    alone: Measurement
    before: Predictions
    after: Predictions
    parameters: int

    def account(self, together: Measurement) -> dict[str, Any]:
        """How far the target moved and what that brought, as numbers by name; `together` are the heads as stored."""
        return {
            "parameters": self.parameters,
            "places": len(self.before.best_P),
            "perplexity_before": self.before.perplexity,
            "perplexity_after": self.after.perplexity,
            "agreement": self.before.agreement(self.after),
            "top1_before": [row[0] for row in self.alone.accuracy.plain],
            "top1_after": [row[0] for row in together.accuracy.plain],
            "tokens_before": _tokens(self.alone),
            "tokens_after": _tokens(together),
        }


def adapt(task: Adaptation) -> Adapted:
    """Train heads (in place) and adapter together, write the adapter, and load the target with it merged.

    Raises the errors of training; what is finished stays, and the same call goes on from it.
    """
    recipe, lora, target = task.recipe, task.lora, task.target
    texts, say, alone = task.texts, task.hooks.say, _measured_alone(task)
    mark_joint(lora, task.folder)
    before = _predictions(task, target)
    learner = _with_plain_layers(recipe, target)
    adapter = LearningAdapter(learner.model, lora, recipe.seed)
    try:
        checkpoints = joint_checkpoints(recipe, lora, target.fingerprint, task.folder)
        taken = ", ".join(name for name, _ in task.heads.named_parameters())
        goes_on = " (from its last checkpoint)" if checkpoints.exists() else ""
        say(
            f"heads and adapter learn together{goes_on}: heads go on from their own training ({taken}); new: "
            f"{len(adapter.parameters)} tensors of the adapter, {adapter.num_parameters:,} parameters"
        )
        log = TrainLog(task.folder / JOINT)
        hooks = task.hooks
        outlets = JointOutlets(hooks.on_joint, log, hooks.reporter, first_step=task.steps, stop_asked=hooks.stop_asked)
        learners = Learners(learner, adapter, task.heads)
        with hooks.between():
            train_joint(learners, texts, JointSettings(lora, recipe.train, recipe.seed), checkpoints, outlets)
        fingerprint = adapter.save(task.folder / FOLDER)
        parameters = adapter.num_parameters
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"the memory of {target.device} does not hold a step of {lora.batch_size} texts",
            "lower lora.batch_size, or set lora.gradient_checkpointing=true, and go on with --resume-from-checkpoint",
        ) from error
    finally:
        adapter.remove()
    del learner, adapter, learners
    gc.collect()
    stored = StoredAdapter(task.folder / FOLDER, fingerprint, target.fingerprint, target.name)
    adapted = load_target(recipe.target, stored)
    own = {"adapter": fingerprint, "target_fingerprint": joined(target.fingerprint, fingerprint)}
    task.heads.config = task.heads.config.model_copy(update=own)
    say("the adapted model answers the held-out prompts: the heads are measured on its own words")
    after = _predictions(task, adapted)
    return Adapted(adapted, _own_words(task, adapted, fingerprint), alone, before, after, parameters)


def check_joint(recipe: Recipe, folder: Path) -> None:
    """Raise what is wrong with the section lora before a model is loaded: for this model, and for this run folder.

    Raises RecipeError for what can't be adapted, TrainingError for a stage that was started with other settings.
    """
    lora = recipe.lora
    if lora is None:
        return
    source = converted(find_source(recipe.target.model))
    config = fetch_config(source, recipe.target.revision)
    if getattr(config, "quantization_config", None) is not None and source.gguf_file is None:
        raise RecipeError(
            f"lora: {recipe.target.model} is quantised, and an adapter is merged into full weights",
            "name the model in full precision, or leave the section lora out",
        )
    if choose_dtype(recipe.target.dtype, choose_device(recipe.target.device)) == torch.float16:
        raise RecipeError(
            "lora can't learn in float16, whose gradients vanish, and this device has no bfloat16",
            "set target.dtype=float32",
        )
    adaptable(meta_model(config), lora.target_modules)
    _check_mark(lora, folder)


def mark_joint(lora: LoraSettings, folder: Path) -> None:
    """Note the settings that the stage's checkpoints depend on. Raises TrainingError."""
    file = folder / JOINT / "settings.json"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(_learning(lora), indent=2) + "\n")
    except OSError as error:
        raise TrainingError(
            f"can't write to {file.parent}: {error.strerror}", "choose another --output-dir, or free some space"
        ) from error


def joint_checkpoints(recipe: Recipe, lora: LoraSettings, fingerprint: str, folder: Path) -> Checkpoints:
    """The states of the second stage: they belong to the heads' own training and to the section lora."""
    digest = hashlib.sha256(json.dumps([recipe_hash(recipe), _learning(lora)], sort_keys=True).encode())
    return Checkpoints(folder / JOINT, RunIdentity(digest.hexdigest()[:16], fingerprint))


def _check_mark(lora: LoraSettings, folder: Path) -> None:
    """Raise TrainingError when the stage was started with other settings and has a state to go on from."""
    mark = folder / JOINT / "settings.json"
    if not Checkpoints(folder / JOINT, RunIdentity("", "")).exists() or not mark.is_file():
        return
    try:
        found: Mapping[str, Any] = parse_json(mark.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError) as error:
        raise TrainingError(f"{mark} can't be read: {error}", f"delete {mark.parent} to adapt anew") from error
    wanted = _learning(lora)
    differing = [name for name in wanted if found.get(name, wanted[name]) != wanted[name]]
    if differing:
        raise TrainingError(
            f"{folder} was adapted with other settings: {', '.join(f'lora.{name}' for name in differing)}",
            f"go back to them, or delete {mark.parent} to adapt anew with the heads as they learnt alone",
        )


def _learning(lora: LoraSettings) -> dict[str, Any]:
    """Every setting of the section that changes what is learnt."""
    return lora.model_dump(mode="json", exclude=_FREE)


def _measured_alone(task: Adaptation) -> Measurement:
    """What the heads are worth before they learn with the adapter."""
    num_ranks, chunk = min(NUM_RANKS, task.heads.config.draft_vocab), task.recipe.train.loss_chunk
    return measure(task.heads, task.sets.held_out, num_ranks=num_ranks, chunk=chunk, source=SOURCE)


def _with_plain_layers(recipe: Recipe, target: Target) -> Target:
    """The target itself, or a copy where its layers are laid out for decoding: gradients don't go through these."""
    if not RUNNERS[target.identity.runner].packs:
        target.release()  # what was recorded knows no adapter
        return target
    return load_unchecked(recipe.target.model_copy(update={"runner": "eager"}))


def _predictions(task: Adaptation, target: Target) -> Predictions:
    """What this target says of the held-out texts."""
    chunk = task.recipe.train.loss_chunk
    return predictions(target, task.texts.held_out, batch_size=task.lora.batch_size, chunk=chunk)


def _own_words(task: Adaptation, adapted: Target, fingerprint: str) -> Examples:
    """The held-out prompts as the target with the adapter of this fingerprint answers them."""
    # processes that write beside load the target of the recipe, which is not adapted
    here = task.recipe.data.model_copy(update={"workers": 1})
    stage = Stage(task.recipe.model_copy(update={"data": here}), adapted, task.folder / "written", task.hooks.on_data)
    asked = task.material.asked
    words = own_words(stage, asked, task.folder / JOINT / "held-out" / fingerprint)
    said = [sample for sample in words.by_key() if words.keys[sample] in asked]
    return Examples.of(words, said, task.heads.draft_ids, task.heads.config.num_heads)


def _tokens(measured: Measurement) -> float:
    """Tokens a step of the best tree of TREE_NODES nodes, the bonus token included."""
    paths: Sequence[Sequence[int]] = fit_tree_joint(measured.paths, TREE_NODES)
    return 1 + sum(measured.paths.probability(tuple(path)) for path in paths)
