"""What a run would do, write and need, from the recipe, the model's config and the run folder. Changes nothing."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch

from medusa_cli.config.parts import looks_back
from medusa_cli.config.recipe import DataSettings, Recipe
from medusa_cli.data.conversations import Counts
from medusa_cli.data.rows import is_on_the_hub
from medusa_cli.data.user_turns import asked_turns
from medusa_cli.errors import TargetError
from medusa_cli.heads.base import Heads
from medusa_cli.heads.config import HeadsConfig
from medusa_cli.heads.kinds import heads_class
from medusa_cli.model.loading.gguf_conversion import converted
from medusa_cli.model.loading.huggingface import fetch_config, weights_are_here
from medusa_cli.model.loading.load import choose_device, load_target
from medusa_cli.model.loading.refusals import refuse_config
from medusa_cli.model.loading.sources import Source, find_source
from medusa_cli.model.target import Target
from medusa_cli.pipeline.data_stage import conversations_of, has_answers
from medusa_cli.pipeline.planning.disk import Disk, count_lines, disk_of, stored_bytes, stored_samples
from medusa_cli.pipeline.planning.effort import Effort, measure_effort
from medusa_cli.pipeline.planning.joint_plan import JointPlan, joint_plan, joint_seconds
from medusa_cli.pipeline.planning.run_memory import (
    FLOAT,
    Memory,
    draft_width,
    inner_width,
    memory_of,
    meta_model,
    outline_of,
    packs,
)
from medusa_cli.pipeline.run import fresh_heads
from medusa_cli.train.early_stopping import steps_between
from medusa_cli.train.store import bytes_per_place
from medusa_cli.util.paths import expanded

# the heads in float32, and two checkpoints of them with AdamW's two moments; with patience the best heads in each too
AROUND = 64  # tokens of a chat template around a prompt, about
COPIES_OF_THE_HEADS, COPIES_OF_THE_BEST = 1 + 2 * 3, 2


@dataclass(frozen=True)
class Seconds:
    """What each stage that is left would take at most, if every text ran to its budget; without loading and fitting.

    What a server takes is not known. A data set is taken to have answers unless others are asked for.
    """

    prompts: float
    answers: float
    reading: float
    training: float
    decodes: float
    adapter: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.prompts + self.answers + self.reading + self.training + self.decodes + self.adapter


@dataclass(frozen=True)
class Plan:
    """Counts of what is there and of what there may be at most; how much is written depends on where texts end."""

    samples: int
    prompts_written: int
    samples_ready: int
    tokens_at_most: int
    steps_saved: int
    steps_at_most: int
    bytes_there: int
    bytes_at_most: int
    heads: int
    parameters: int
    memory: Memory
    disk: Disk
    seconds: Seconds | None = None
    why_not_timed: str | None = None
    joint: JointPlan | None = None


def with_counted_data(recipe: Recipe) -> Recipe:
    """The recipe with no more samples than a file of this machine holds; a data set of the hub is not fetched for it.

    Raises what the run itself would raise for this data.
    """
    data = recipe.data
    if data.dataset == "self" or is_on_the_hub(data.dataset):
        return recipe
    conversations = list(islice(conversations_of(data, Counts()), data.num_samples))
    given = has_answers(conversations) and data.answers_from == "auto"
    found = len(conversations) if given else len(asked_turns(conversations, data.num_samples))
    few = data.model_copy(update={"num_samples": max(1, found)})
    return recipe.model_copy(update={"data": few})


def plan_of(recipe: Recipe) -> Plan:
    """The plan of this recipe, without times. Raises TargetError when the model is not there, or can't verify trees."""
    config = fetch_config(_source(recipe), recipe.target.revision)
    refuse_config(config, recipe.target.model)
    text = config.get_text_config()
    folder, data = expanded(recipe.output_dir), recipe.data
    given = data.dataset != "self" and data.answers_from == "auto"
    tokens = data.max_seq_length if given else _answer_tokens(data)
    learnt = data.num_samples * (1 - data.held_out) * tokens * recipe.train.place_share
    steps = math.ceil(recipe.train.epochs * learnt / recipe.train.batch_size)
    parameters = _parameters(outline_of(recipe, text.hidden_size, text.vocab_size, text.num_hidden_layers))
    whole = looks_back(recipe.heads.type)
    longest = data.max_seq_length
    if data.dataset == "self" and data.target_answers:
        longest = min(longest, AROUND + data.max_prompt_tokens + tokens)
    places = data.num_samples * (tokens + 1 if data.target_answers and not whole else longest)
    # held-out prompts are answered by the target where its words are not learnt, and by the adapted one
    times = (not data.target_answers) + (recipe.lora is not None)
    held_out = longest if whole else _answer_tokens(data)
    places += times * math.ceil(data.num_samples * data.held_out) * held_out
    ready = max(stored_samples(folder / "written" / store) for store in ("answers", "read"))
    state_bytes = places * sum(bytes_per_place(text.hidden_size, inner_width(recipe, text)).values())
    copies = COPIES_OF_THE_HEADS + (COPIES_OF_THE_BEST if recipe.train.patience else 0)
    memory = memory_of(recipe, config, parameters)
    joint = None
    if recipe.lora is not None:
        joint = joint_plan(
            recipe,
            recipe.lora,
            meta_model(config),
            weights=memory.weights,
            head_parameters=parameters,
            copied=packs(recipe),
        )
        memory = replace(memory, joint=joint.memory)
    return Plan(
        samples=data.num_samples,
        prompts_written=count_lines(folder / "written" / "prompts.jsonl"),
        samples_ready=ready,
        tokens_at_most=data.num_samples * tokens,
        steps_saved=max((int(file.stem.partition("-")[2]) for file in folder.glob("checkpoints/step-*.pt")), default=0),
        steps_at_most=min(steps, recipe.train.max_steps or steps),
        bytes_there=sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
        bytes_at_most=state_bytes + copies * FLOAT * parameters,
        heads=recipe.heads.num_heads,
        parameters=parameters,
        memory=memory,
        disk=_disk(recipe, folder, state_bytes // data.num_samples * max(0, data.num_samples - ready)),
        joint=joint,
    )


def _disk(recipe: Recipe, folder: Path, missing: int) -> Disk:
    """Room for so many bytes of hidden states at most, beside those that are there."""
    there = sum(stored_bytes(folder / "written" / store) for store in ("answers", "read"))
    return disk_of(recipe.data, folder, there, missing)


def timed(plan: Plan, recipe: Recipe, say: Callable[[str], None]) -> Plan:
    """The plan with the time that is left, from some seconds of each kind of work; or with what keeps it from that.

    Nothing is downloaded for it. Raises TargetError when the model can't be loaded.
    """
    why_not = _why_not(plan, recipe)
    if why_not:
        return replace(plan, why_not_timed=why_not)
    say("trying for some seconds how fast this machine writes and learns …")
    return timed_on(load_target(recipe.target), plan, recipe)


def timed_on(target: Target, plan: Plan, recipe: Recipe) -> Plan:
    """As `timed`, on a target that is loaded. What a run draws afterwards is what it would have drawn without."""
    device = target.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        effort = measure_effort(recipe, target, _noise_heads(recipe, target))
    return replace(plan, seconds=_seconds(plan, recipe, effort))


def _why_not(plan: Plan, recipe: Recipe) -> str | None:
    """What keeps the work from being tried here, in words."""
    if not weights_are_here(_source(recipe), recipe.target.revision):
        return "the model's weights are not on this machine"
    try:
        choose_device(recipe.target.device)
    except TargetError as error:
        return error.message
    free = plan.memory.free
    if free is not None and plan.memory.needed > free:
        return f"the run needs about {plan.memory.needed >> 20:,} MiB of memory, and {free >> 20:,} MiB are free"
    return None


def _seconds(plan: Plan, recipe: Recipe, effort: Effort) -> Seconds:
    """What each stage that is left takes."""
    data = recipe.data
    device = choose_device(recipe.target.device)
    # processes on one GPU share it; on a CPU each was given its share of the cores
    side_by_side = data.rows * (data.workers if device.type == "cpu" else 1)
    unanswered = data.num_samples - min(plan.samples_ready, data.num_samples)

    def writing(texts: int, prompt: int, new: int) -> float:
        rounds = texts / min(side_by_side, max(texts, 1))
        rows = min(data.rows, max(texts, 1))
        return rounds * (rows * prompt * effort.read_token + new * effort.step)

    steps = max(0, plan.steps_at_most - plan.steps_saved)
    learning = steps * recipe.train.batch_size * effort.learn_place
    own, new = data.dataset == "self", _answer_tokens(data)
    unwritten = data.num_samples - min(plan.prompts_written, data.num_samples)
    prompt = data.max_prompt_tokens if own else data.max_seq_length - new
    lora, joint = recipe.lora, plan.joint
    return Seconds(
        adapter=joint_seconds(recipe, lora, joint.steps_at_most, effort.read_token) if lora and joint else 0.0,
        prompts=writing(unwritten, 0, data.max_prompt_tokens) if own else 0.0,
        answers=writing(unanswered, prompt, new) if data.target_answers else 0.0,
        reading=0.0 if data.target_answers else unanswered * data.max_seq_length * effort.read_token,
        training=learning,
        decodes=_decodes(recipe, steps, plan.steps_at_most, effort.decode),
    )


def _decodes(recipe: Recipe, steps: int, total: int, one: float) -> float:
    """Seconds of the decodes of held-out prompts in so many steps that are left of all."""
    settings = recipe.train
    if not settings.decode_steps or not steps:
        return 0.0
    return math.ceil(steps / steps_between(settings, total)) * one


def _answer_tokens(data: DataSettings) -> int:
    """Tokens of an answer that is made anew, at most."""
    return min(data.max_answer_tokens, data.max_seq_length // 2)


def _source(recipe: Recipe) -> Source:
    """Where the model's files are."""
    return converted(find_source(recipe.target.model))


def _noise_heads(recipe: Recipe, target: Target) -> Heads:
    """Heads over the first tokens: which ones makes no difference to the time."""
    return fresh_heads(recipe, target, torch.arange(draft_width(recipe, target.real_vocab)))


def _parameters(config: HeadsConfig) -> int:
    """Trained parameters of the heads, counted on heads without memory."""
    with torch.device("meta"):
        heads = heads_class(config.type)(config, torch.zeros(config.draft_vocab, dtype=torch.long))
    return sum(parameter.numel() for parameter in heads.parameters())
