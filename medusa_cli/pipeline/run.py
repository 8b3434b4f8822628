"""From a recipe to a folder of heads, resumable at every stage.

run.json         whose run it is                                            (pipeline/run_folder.py)
written/         what the target wrote or read, with its hidden states      (data stage)
checkpoints/     the newest states of the training run                      (training)
joint/ adapter/  an adapter that learns with the heads, if the recipe has one (pipeline/joint_stage.py)
heads.safetensors heads.json tree.json accuracy.json train.jsonl training.png provenance.json README.md
"""

import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medusa_cli import __version__
from medusa_cli.config.recipe import Recipe
from medusa_cli.data.distill import read_written
from medusa_cli.errors import TrainingError
from medusa_cli.formats.native import write_heads
from medusa_cli.formats.places import find_heads
from medusa_cli.heads.base import Heads
from medusa_cli.heads.kinds import heads_class
from medusa_cli.heads.start import take_over
from medusa_cli.heads.traits import traits_of
from medusa_cli.model.target import Target
from medusa_cli.pipeline.data_context import OnProgress, Stage
from medusa_cli.pipeline.data_stage import gather, own_words, prompts_of
from medusa_cli.pipeline.decode_eval import Probe, choose_prompts
from medusa_cli.pipeline.distributed import Task, call
from medusa_cli.pipeline.inner_states import reader_of
from medusa_cli.pipeline.joint_stage import Adaptation, adapt
from medusa_cli.pipeline.planning.disk import check_training
from medusa_cli.pipeline.run_folder import RunFolder
from medusa_cli.pipeline.tree_fit import Fitted, OnPart, fit
from medusa_cli.registry import format_of, read_heads
from medusa_cli.train.card import FittedTree, Provenance, write_card
from medusa_cli.train.checkpoint import TrainLog
from medusa_cli.train.corpus import Corpus, choose_draft_ids
from medusa_cli.train.curves import PICTURE, Curves, as_markdown
from medusa_cli.train.events import Event, Outlets, Reporter
from medusa_cli.train.joint.events import JointEvent
from medusa_cli.train.loop import Sets, train
from medusa_cli.train.parallel import ALONE, Group
from medusa_cli.train.text_examples import examples_of

SOME_STATES = 4096  # that tell heads how large the target's are


@dataclass(frozen=True)
class Hooks:
    """How a run is watched: the data stage's progress, the trainings' events, sentences and those that warn.

    draw         makes a picture of how the heads learnt, and says whether it could
    on_part      how far what comes after the training is
    stop_asked   whether the user wants the run to stop; training looks after each step, and saves before it stops
    between      what is entered where `stop_asked` is looked at, so that an interrupt needn't cut a step in two
    """

    on_data: OnProgress
    on_event: Callable[[Event], None]
    say: Callable[[str], None]
    warn: Callable[[str], None]
    reporter: Reporter | None = None
    draw: Callable[[Curves, Path], bool] = lambda curves, file: False
    stop_asked: Callable[[], bool] = bool
    between: Callable[[], AbstractContextManager[None]] = nullcontext
    on_joint: Callable[[JointEvent], None] = lambda event: None
    on_part: OnPart = lambda part, done, total: None


@dataclass(frozen=True)
class Made:
    """What a finished run has to show; `data` counts samples and tokens, `answers` says who wrote them and how.

    adapter   how far an adapter moved the target; None without one
    """

    folder: Path
    fitted: Fitted
    data: Mapping[str, int]
    answers: Mapping[str, Any]
    adapter: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Material:
    """What the data stage leaves: samples of `corpus` to learn from, and samples of `judge` to be measured on.

    The corpus lies in the folder `store`. The judge's learnt tokens are always the target's own words; it is the
    corpus itself when those are too.

    held_out  the corpus's samples that are not learnt
    prompts   ids of whole prompts by key, where the corpus's samples begin with their prompts' last tokens
    asked     ids of what the judged samples answer, by key, as far as they are known
    """

    store: Path
    corpus: Corpus
    learnt: Sequence[int]
    judge: Corpus
    judged: Sequence[int]
    counts: Mapping[str, int]
    answers: Mapping[str, Any]
    held_out: Sequence[int]
    prompts: Mapping[str, Sequence[int]]
    asked: Mapping[str, Sequence[int]]


def make_heads(
    target: Target, folder: RunFolder, hooks: Hooks, command: str, source: Heads | None, group: Group = ALONE
) -> Made:
    """The whole path of the folder's recipe; what is finished stays, and the same call goes on from it.

    command   the command line, for the model card
    source    heads to go on from: `source_of`
    group     the processes that train them; this one leads, and the others are in `together.answer_call`

    Raises the errors of its stages.
    """
    recipe = folder.recipe
    folder.claim(target.fingerprint, target.identity.runner)
    material = _gather(Stage(recipe, target, folder.path / "written", hooks.on_data), hooks, folder.by_keys)
    heads = _first_heads(recipe, target, material, source, hooks.say)
    sets = _examples(recipe, target, material, heads)
    hooks.say(
        f"{len(sets.train):,} places to learn from, {len(sets.held_out):,} held out; the draft vocabulary of "
        f"{heads.config.draft_vocab:,} covers {sets.train.coverage()[0]:.1%} of the tokens to learn"
    )
    check_training(heads, folder.path)
    folder.begin_training(target.fingerprint, target.identity.runner)
    checkpoints = folder.checkpoints(target.fingerprint)
    if checkpoints.newest_step:
        hooks.say(f"going on from step {checkpoints.newest_step} of the training in {folder.path}")
    task = Task(material.store.resolve(), list(material.learnt), recipe.train, recipe.seed, checkpoints)
    call(group, task, heads, recipe)
    sets = replace(sets, decode=_probe(recipe, target, material, hooks), group=group)
    outlets = Outlets(hooks.on_event, TrainLog(folder.path), hooks.reporter, hooks.stop_asked)
    with hooks.between():
        last = train(heads, sets, recipe.train, recipe.seed, checkpoints, outlets)
    curves = Curves.read(folder.path)
    hooks.say(f"training: {curves.account()}")
    adapted = None
    if recipe.lora is not None:
        adapted = adapt(
            Adaptation(recipe, recipe.lora, target, folder.path, hooks, material, heads, sets, steps=last.step)
        )
        target, sets = adapted.target, replace(sets, held_out=adapted.held_out)
    _refuse_overflow(heads, recipe.heads.stored)
    write_heads(heads, folder.path, getattr(torch, recipe.heads.stored))
    # What is stored is what is measured: storing in 16 bits rounds.
    heads = read_heads(folder.path, target)
    hooks.say("measuring accuracies on held-out text, and what a step costs on this machine")
    fitted = fit(recipe, target, folder.path, heads, sets.held_out, hooks.on_part)
    moved = adapted.account(fitted.measurement) if adapted else None
    provenance = replace(_provenance(recipe, target, material, command), adapter=moved)
    tree = FittedTree(fitted.tree.paths(), fitted.shape.spec if fitted.shape else None, fitted.choice.expected_tokens)
    training = as_markdown(curves, drawn=hooks.draw(curves, folder.path / PICTURE))
    write_card(folder.path, provenance, fitted.measurement.accuracy, tree, training)
    return Made(folder.path, fitted, material.counts, material.answers, moved)


def _gather(stage: Stage, hooks: Hooks, by_keys: bool) -> Material:
    """The data stage: samples, their split (`by_keys`, or as they were written), and the target's words to measure."""
    gathered = gather(stage)
    for note in gathered.notes:
        hooks.say(f"note: {note}")
    for warning in gathered.warnings:
        hooks.warn(warning)
    corpus = Corpus.open(gathered.store)
    order = corpus.by_key() if by_keys else None
    split = corpus.split(stage.recipe.data.held_out, stage.recipe.seed, order)
    prompts = stage.folder / "prompts.jsonl"
    counts = {
        **gathered.counts,
        "samples": corpus.num_samples,
        "tokens written": sum(row["tokens"] for row in read_written(prompts)),
        "tokens learnt": int(corpus.supervised_T.sum()),
    }
    answers = {**gathered.answers, "lengths": _lengths(corpus)}
    if gathered.by_target:
        counts["tokens written"] += counts["tokens learnt"]
        judge, judged = corpus, split.held_out
        keys = (corpus.keys[sample] for sample in split.held_out)
        asked: Mapping[str, Sequence[int]] = {key: gathered.prompts[key] for key in keys if key in gathered.prompts}
    else:
        asked = prompts_of(stage, corpus, split.held_out)
        judge = own_words(stage, asked, stage.folder / "held-out")
        judged = [sample for sample in judge.by_key() if judge.keys[sample] in asked]
        counts["tokens written"] = sum(judge.learnt_tokens(sample) for sample in judged)
    return Material(
        store=gathered.store,
        corpus=corpus,
        learnt=split.train,
        judge=judge,
        judged=judged,
        counts=counts,
        answers=answers,
        held_out=split.held_out,
        prompts=gathered.prompts,
        asked=asked,
    )


def _lengths(corpus: Corpus) -> dict[str, float]:
    """Learnt tokens of a sample: the mean, half of the samples at most, the longest."""
    learnt_S = np.add.reduceat(corpus.supervised_T, corpus.offsets_S[:-1], dtype=np.int64)
    return {"mean": float(learnt_S.mean()), "median": float(np.median(learnt_S)), "longest": int(learnt_S.max())}


def source_of(recipe: Recipe) -> Heads | None:
    """The heads the recipe goes on from, if any; needs no model. Raises FormatError when they aren't there."""
    folder = find_heads(recipe.heads.start_from, recipe.target.model) if recipe.heads.start_from else None
    return format_of(folder).read(folder) if folder else None


def _first_heads(
    recipe: Recipe, target: Target, material: Material, source: Heads | None, say: Callable[[str], None]
) -> Heads:
    """The heads as their training begins, with what those to go on from have learnt."""
    heads = fresh_heads(recipe, target, _draft_ids(recipe, target, material, source))
    heads.start_at(_some_states(material))
    if source is not None:
        found = take_over(heads, source)
        untrained = f"; untrained: {', '.join(found.new)}" if found.new else ""
        say(f"going on from {recipe.heads.start_from}: {', '.join(found.taken)}{untrained}")
    return heads


def _some_states(material: Material) -> Tensor:
    """Some of the target's final hidden states [N, H], spread evenly over the words that are learnt."""
    places = np.flatnonzero(material.corpus.supervised_T[1:])
    some = places[np.linspace(0, len(places) - 1, min(SOME_STATES, len(places))).astype(np.int64)]
    return torch.from_numpy(np.asarray(material.corpus.hidden_TH[some]))


def _draft_ids(recipe: Recipe, target: Target, material: Material, source: Heads | None) -> Tensor:
    """The draft vocabulary [W]: that of the heads to go on from, or what the samples to learn from need most."""
    chosen_W = choose_draft_ids(
        material.corpus, material.learnt, size=recipe.heads.draft_vocab, real_vocab=target.real_vocab
    )
    if source is None or len(source.draft_ids) != len(chosen_W) or int(source.draft_ids.max()) >= target.real_vocab:
        return chosen_W
    return source.draft_ids


def fresh_heads(recipe: Recipe, target: Target, draft_ids_W: Tensor) -> Heads:
    """Untrained heads for this target over this draft vocabulary, in float32."""
    module = heads_class(recipe.heads.type)
    config = module.describes.of(
        recipe.heads,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab=len(draft_ids_W),
        output_bias=target.output_bias is not None,
        target_name=target.name,
        target_fingerprint=target.fingerprint,
        traits=traits_of(target),
        tap_size=target.tap_size,
        num_layers_seen=target.num_layers,
    )
    return module.fresh(config, draft_ids_W, target.output_weight.float(), target.output_bias)


def _examples(recipe: Recipe, target: Target, material: Material, heads: Heads) -> Sets:
    """What these heads are asked, on both sides of the split."""
    reader = reader_of(target, heads.config.wanted_taps) if recipe.train.states == "rerun" else None
    return Sets(
        train=examples_of(material.corpus, material.learnt, heads.draft_ids, heads.config, reader),
        held_out=examples_of(material.judge, material.judged, heads.draft_ids, heads.config, reader),
    )


def _probe(recipe: Recipe, target: Target, material: Material, hooks: Hooks) -> Probe | None:
    """A decode of held-out prompts; None when none is wanted or none is known."""
    keys = [material.judge.keys[sample] for sample in material.judged]
    prompts = choose_prompts(keys, material.asked) if recipe.train.decode_steps else []
    if recipe.train.decode_steps and not prompts:
        hooks.warn("no prompt of the held-out samples is known: none is decoded while training, and nothing stops it")
    return Probe(target, prompts, recipe) if prompts else None


def _refuse_overflow(heads: Heads, stored: str) -> None:
    """Raise TrainingError before heads that guess nothing take the place of others."""
    if not all(bool(weight.to(getattr(torch, stored)).isfinite().all()) for weight in heads.parameters()):
        raise TrainingError(
            f"the heads hold numbers that {stored} can't: nothing is written",
            "train anew with a lower --learning-rate (delete checkpoints/), or set heads.stored=float32",
        )


def _provenance(recipe: Recipe, target: Target, material: Material, command: str) -> Provenance:
    """How these heads came about."""
    return Provenance(
        base=target.name,
        revision=recipe.target.revision,
        fingerprint=target.fingerprint,
        licence=target.identity.licence,
        command=command,
        recipe=recipe.model_dump(mode="json", exclude={"output_dir"}),
        data=material.counts,
        answers=material.answers,
        versions={"medusa-heads": __version__, "python": platform.python_version()}
        | {name: version(name) for name in ("torch", "transformers")},
    )
