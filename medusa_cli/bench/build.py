"""The arms by name, each on its model, all under one stop rule. The models are loaded here."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.assemble import DrafterChoice, adapter_for, correct_costs, load_drafter, load_target
from medusa_cli.bench.baselines import Arm, HfGreedyArm, LoopArm, Reply, StopRule, Stopwatch, Timed, shaping_settings
from medusa_cli.bench.compare import LLAMA_CPP
from medusa_cli.bench.llama_cpp import LlamaCppArm, gguf_of
from medusa_cli.bench.report import Setup
from medusa_cli.config.parts import drafters as known_drafters
from medusa_cli.config.recipe import TargetSettings
from medusa_cli.contracts import Drafter
from medusa_cli.data.conversations import Message
from medusa_cli.decode.admission import check_prompt
from medusa_cli.decode.chat import ends_of, ids_of
from medusa_cli.decode.loop import Generation, Parts, collect
from medusa_cli.decode.memory import check_room
from medusa_cli.decode.rows import Limits
from medusa_cli.drafters.none import NoDrafter
from medusa_cli.errors import RecipeError
from medusa_cli.model.adapter import StoredAdapter
from medusa_cli.model.clock import now
from medusa_cli.model.runners.select import NOT_COMPILED, could_compile

_LOOKUP_TOKENS = 6


@dataclass(frozen=True)
class Bench:
    """Everything a run needs from the models.

    subject        the arm that the others are compared with
    encode         a question's text to prompt ids, the chat template included
    plain          text to ids without a template
    logits_after   a prompt and the ids written after it to the target's logits [V] after them
    make_room      told of the prompts and how many are written at once before any runs; DataError or TargetError for
                   one that can't be asked, DataError when their cache can't fit into memory
    notes          sentences about settings that had to be made alike
    fingerprint    of the target's weights
    correct_costs  puts right what is remembered of steps by what they took; for a machine that was left alone
    """

    subject: str
    arms: Sequence[Arm]
    stop: StopRule
    setup: Setup
    vocab_size: int
    encode: Callable[[str], list[int]]
    plain: Callable[[str], list[int]]
    logits_after: Callable[[Sequence[int], list[int]], Tensor]
    make_room: Callable[[Sequence[Sequence[int]], int], None]
    clock: Callable[[], float]
    notes: Sequence[str]
    fingerprint: str
    correct_costs: Callable[[], None]


def build_arms(settings: TargetSettings, choice: DrafterChoice, names: Sequence[str], max_new_tokens: int) -> Bench:
    """The arms by name, all on one stop rule. The models are loaded here, llama.cpp's when room is made."""
    gguf = gguf_of(settings) if LLAMA_CPP in names else None  # first: what is missing is said before a model is loaded
    adapter = adapter_for(choice, settings.model)
    if gguf and adapter:
        raise RecipeError(
            f"the {LLAMA_CPP} arm runs {gguf} as it is, and these heads belong to the model with an adapter",
            f"leave {LLAMA_CPP} out of --compare",
        )
    target = load_target(settings, adapter)
    on_cpu = torch.device(target.device).type == "cpu"
    # A host clock can't time the parts of a step that are only queued on an accelerator.
    watch = Stopwatch(time.perf_counter) if on_cpu else None
    limits = ends_of(target, max_new_tokens).limits
    stop = StopRule(limits.stop_ids, limits.max_new_tokens, limits.context_limit)
    assert choice.name is not None
    subject = choice.name
    drafters = _drafters(choice, subject, names, target)
    arms: list[Arm] = [
        LoopArm(name, _loop(target, drafter, Greedy(), limits, watch)) for name, drafter in drafters.items()
    ]
    llama = LlamaCppArm(gguf, stop, torch.get_num_threads()) if gguf else None
    hf_arms = _hf_arms(settings, adapter, names, target, stop)
    neutralised = shaping_settings(target.model.generation_config)
    notes = {f"Note: {_neutralised(neutralised)}"} if neutralised else set[str]()
    if settings.runner == "auto" and could_compile(target):
        notes.add(f"Note: {NOT_COMPILED}.")
    if adapter:
        notes.add(f"Note: every arm runs {target.name} with the adapter that the heads belong to.")

    def make_room(prompts: Sequence[Sequence[int]], num_rows: int) -> None:
        for number, prompt in enumerate(prompts, start=1):
            check_prompt(target, prompt, limits, f"prompt {number}")
        check_room(target, prompts, limits, num_rows, drafters[subject].size, in_pieces=not hf_arms)
        if llama:
            llama.make_room(max(len(prompt) for prompt in prompts))

    return Bench(
        subject=subject,
        arms=[*arms, *hf_arms, *([llama] if llama else [])],
        stop=stop,
        setup=Setup(
            target.name, target.dtype_name, str(target.device), target.identity.runner, torch.get_num_threads()
        ),
        vocab_size=target.real_vocab,
        encode=lambda text: ids_of(target, [Message("user", text)]),
        plain=lambda text: list(target.tokenizer(text, add_special_tokens=False)["input_ids"]),
        logits_after=partial(_logits_after, target),
        make_room=make_room,
        clock=lambda: now(target.device),
        notes=sorted(notes),
        fingerprint=target.fingerprint,
        correct_costs=lambda: correct_costs(drafters[subject], target),
    )


def _drafters(choice: DrafterChoice, subject: str, names: Sequence[str], target: Any) -> dict[str, Drafter]:
    """What guesses in each arm of our loop; flags for heads and trees are the subject's."""
    drafters = {subject: load_drafter(choice, target)}
    for name, part in known_drafters().items():
        if name in names and name not in (*drafters, LLAMA_CPP):  # that arm is llama.cpp by itself
            heads = choice.heads if part.heads is not None else None
            wishes = choice.wishes if part.draft_model else replace(choice.wishes, draft_model=None)
            other = replace(choice, name=name, heads=heads, tree=None, tree_size=None, wishes=wishes)
            drafters[name] = load_drafter(other, target)
    if "greedy" in names:
        drafters["greedy"] = NoDrafter()
    return drafters


def _loop(
    target: Any, drafter: Any, rule: Any, limits: Limits, watch: Stopwatch | None
) -> Callable[[Sequence[list[int]]], list[Reply]]:
    """Our loop on a batch of prompts, its parts timed when there is a watch."""
    if watch is not None:
        drafter = Timed(drafter, {name: "draft" for name in ("join", "keep", "move", "drop", "propose")}, watch)
        target = Timed(target, {"verify": "verify", "read_piece": "prefill"}, watch)
        rule = Timed(rule, {"accept": "accept"}, watch)

    def run(prompts: Sequence[list[int]]) -> list[Reply]:
        if watch is not None:
            watch.reset()
        written = collect(Parts(target, drafter, rule), prompts, limits, max_rows=len(prompts))
        return [_reply(one, watch, len(prompts)) for one in written]

    return run


def _reply(written: Generation, watch: Stopwatch | None, num_replies: int) -> Reply:
    """What the loop wrote, with its share of the time that all replies of a batch took together."""
    return Reply(
        written.token_ids,
        written.finish_reason,
        written.num_steps,
        written.kept,
        written.num_nodes,
        draft_depth=watch.deepest if watch else max(written.kept, default=1) - 1,
        time_split={part: seconds / num_replies for part, seconds in watch.seconds.items()} if watch else {},
    )


def _hf_arms(
    settings: TargetSettings, adapter: StoredAdapter | None, names: Sequence[str], target: Any, stop: StopRule
) -> list[Any]:
    """The transformers arms in the dtypes asked for, on a CPU in both; arms of one dtype share a model."""
    both_dtypes = torch.device(target.device).type == "cpu"
    models: dict[str, Any] = {}
    arms = []
    for name in names:
        base, _, asked = name.partition("@")
        if not base.startswith("hf-"):
            continue
        dtypes = [asked] if asked else ["float32", "bfloat16"] if both_dtypes else [target.dtype_name]
        for dtype in dtypes:
            if dtype not in models:
                plain = settings.model_copy(update={"dtype": dtype, "runner": "eager", "attention": "sdpa"})
                models[dtype] = load_target(plain, adapter).model
            title = f"{base}@{dtype}" if asked or len(dtypes) > 1 else base
            lookup = _LOOKUP_TOKENS if base == "hf-prompt-lookup" else None
            arms.append(HfGreedyArm(title, models[dtype], stop, min(target.stop_ids, default=0), lookup))
    return list({arm.name: arm for arm in arms}.values())


def _neutralised(settings: Mapping[str, Any]) -> str:
    """What the model's generation_config asked for and no arm does."""
    listed = ", ".join(f"{name}={value}" for name, value in settings.items())
    return f"the model's generation_config has {listed}; every arm runs without."


def _logits_after(target: Any, prompt: Sequence[int], new_ids: list[int]) -> Tensor:
    """The target's logits [V] after a prompt and what is written behind it, by one plain forward."""
    ids = [*prompt, *new_ids]
    first = target.tables.first_length(len(prompt), len(ids))
    return target.prefill([ids], target.new_cache(1, len(ids)), as_long_as=[first]).logits_BNV[0, 0]
