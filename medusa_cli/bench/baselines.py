"""Arms: the ways of writing a reply that a bench sets side by side, all under one stop rule.

This file knows no loop, no drafter and no clock of its own: our loop comes in as a callable.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from transformers import GenerationConfig

from medusa_cli.errors import DataError

PARTS = ("prefill", "draft", "verify", "accept", "keep", "other")


@dataclass(frozen=True)
class Reply:
    """What an arm wrote for one prompt.

    token_ids      new ids, the one decided by the prefill included
    num_steps      forwards of the target after the prefill
    kept           tokens gained at each step, the bonus token included
    num_nodes      nodes verified at each step, the root included (1 = no guess was checked)
    draft_depth    the deepest guess offered in any step
    time_split     seconds spent per part of PARTS; parts that were not measured are left out
    """

    token_ids: Sequence[int]
    finish_reason: Literal["stop", "length"]
    num_steps: int
    kept: Sequence[int]
    num_nodes: Sequence[int]
    draft_depth: int = 0
    time_split: Mapping[str, float] = field(default_factory=dict)


class Arm(Protocol):
    """One way of writing a reply. Every call starts clean: nothing of an earlier prompt is left over."""

    @property
    def name(self) -> str:
        """The name in the report, for instance `medusa` or `hf-greedy@bfloat16`."""

    def generate(self, prompts: Sequence[list[int]]) -> list[Reply]:
        """The replies to prompts that are written side by side, in their order."""


@dataclass(frozen=True)
class StopRule:
    """When a reply ends, for every arm alike: at the first stop id, at the budget, or at the context limit."""

    stop_ids: frozenset[int]
    max_new_tokens: int
    context_limit: int | None

    def budget(self, num_prompt_tokens: int) -> int:
        """New tokens allowed after a prompt of this length. Raises DataError when there is room for none."""
        if self.context_limit is None:
            return self.max_new_tokens
        room = self.context_limit - num_prompt_tokens
        if room < 1:
            raise DataError(
                f"a prompt of {num_prompt_tokens} tokens leaves no room: the model takes {self.context_limit} in all",
                "shorten the prompt, or take a model with a longer context",
            )
        return min(self.max_new_tokens, room)

    def clip(self, reply: Reply, num_prompt_tokens: int) -> Reply:
        """The reply as this rule ends it; tokens past the end are taken off the steps that gained them."""
        ids = list(reply.token_ids[: self.budget(num_prompt_tokens)])
        end = next((place + 1 for place, token in enumerate(ids) if token in self.stop_ids), len(ids))
        ids = ids[:end]
        kept, surplus = list(reply.kept), len(reply.token_ids) - len(ids)
        for step in reversed(range(len(kept))):
            taken = min(kept[step], surplus)
            kept[step] -= taken
            surplus -= taken
        reason: Literal["stop", "length"] = "stop" if ids and ids[-1] in self.stop_ids else "length"
        return replace(reply, token_ids=ids, kept=kept, finish_reason=reason)


@dataclass(frozen=True)
class LoopArm:
    """Our own loop, with whichever drafter the callable was built with."""

    name: str
    run: Callable[[Sequence[list[int]]], list[Reply]]

    def generate(self, prompts: Sequence[list[int]]) -> list[Reply]:
        """The replies of one call of the loop."""
        return self.run(prompts)


class HfGreedyArm:
    """`transformers` generate with do_sample=False, and prompt lookup when `lookup_tokens` is given.

    The model's generation_config may hold settings that change greedy text (Qwen's repetition_penalty): they are
    neutral while this arm writes, and `neutralised` holds what they were. `generate` fills what a call leaves
    open from the model's own generation_config, so that config itself is replaced for the length of the call.
    """

    def __init__(self, name: str, model: Any, stop: StopRule, pad_id: int, lookup_tokens: int | None = None) -> None:
        self.name = name
        self.neutralised = shaping_settings(model.generation_config)
        self._model, self._stop, self._pad_id, self._lookup_tokens = model, stop, pad_id, lookup_tokens

    def generate(self, prompts: Sequence[list[int]]) -> list[Reply]:
        """The replies, of prompts padded on the left where there are several; steps are counted at the model's door."""
        longest = max(len(prompt) for prompt in prompts)
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max(self._stop.budget(len(prompt)) for prompt in prompts),
            eos_token_id=sorted(self._stop.stop_ids) or None,
            pad_token_id=self._pad_id,
            prompt_lookup_num_tokens=self._lookup_tokens,
        )
        padding = [longest - len(prompt) for prompt in prompts]
        rows = [[self._pad_id] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)]
        mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
        ids, seen = torch.tensor(rows, device=self._model.device), torch.tensor(mask, device=self._model.device)
        with _own_config(self._model, config), _forwards(self._model) as forwards, torch.inference_mode():
            written = self._model.generate(ids, attention_mask=seen)[:, longest:].tolist()
        return [_reply(self._ended(new_ids), longest, forwards) for new_ids in written]

    def _ended(self, new_ids: list[int]) -> list[int]:
        """A row's ids without what stands after its end because other rows went on."""
        ends = [place + 1 for place, token in enumerate(new_ids) if token in self._stop.stop_ids]
        return new_ids[: ends[0]] if ends else new_ids


# Settings of a generation_config that change what greedy decoding writes, with the value that changes nothing.
_NEUTRAL: Mapping[str, Any] = {
    "num_beams": 1, "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0, "min_length": 0, "min_new_tokens": 0, "bad_words_ids": None,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "suppress_tokens": None,
    "begin_suppress_tokens": None, "exponential_decay_length_penalty": None, "sequence_bias": None,
    "guidance_scale": None, "watermarking_config": None, "stop_strings": None, "max_time": None,
    "penalty_alpha": 0.0, "dola_layers": None, "num_beam_groups": 1, "constraints": None, "force_words_ids": None,
    "token_healing": False,
}  # fmt: skip


def shaping_settings(config: GenerationConfig) -> dict[str, Any]:
    """The settings in `config` that would change what greedy decoding writes, as they stand."""
    values = {name: getattr(config, name, None) for name in _NEUTRAL}
    return {name: value for name, value in values.items() if value is not None and value != _NEUTRAL[name]}


@contextmanager
def _own_config(model: Any, config: GenerationConfig) -> Iterator[None]:
    """`model` with `config` as its generation_config, put back afterwards."""
    before, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = before


@dataclass(frozen=True)
class _Forward:
    """One forward seen at the model's door: tokens in the cache before it, and tokens put in."""

    cached: int
    put_in: int


@contextmanager
def _forwards(model: Any) -> Iterator[list[_Forward]]:
    """The forwards `model` makes inside this block, in order."""
    seen: list[_Forward] = []

    def look(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # transformers 5.24 renames past_key_values to cache.
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        ids = args[0] if args else kwargs["input_ids"]
        seen.append(_Forward(0 if cache is None else int(cache.get_seq_length()), int(ids.shape[1])))

    handle = model.register_forward_pre_hook(look, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def _reply(token_ids: list[int], num_prompt_tokens: int, forwards: Sequence[_Forward]) -> Reply:
    """Steps from the forwards: the cache always lacks one decided token, the root.

    Prompt lookup checks guesses in its first forward too; what that gains beside the prefill token belongs to
    no step, so `kept` may add up to less than all tokens but one. Forwards after a row's end are no steps of its.
    """
    steps = [step for step in forwards[1:] if step.cached - num_prompt_tokens + 1 < len(token_ids)]
    written_before = [step.cached - num_prompt_tokens + 1 for step in steps] + [len(token_ids)]
    kept = [max(0, after - before) for before, after in zip(written_before, written_before[1:], strict=False)]
    num_nodes = [step.put_in for step in steps]
    return Reply(token_ids, "length", len(steps), kept, num_nodes, draft_depth=max(num_nodes, default=1) - 1)


class Stopwatch:
    """Seconds per part of a step. The clock is handed in."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.deepest = 0

    def reset(self) -> None:
        """Forget an earlier prompt."""
        self.seconds.clear()
        self.deepest = 0

    def call(self, part: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`function`'s result, its time counted under `part`."""
        began = self._clock()
        try:
            return function(*args, **kwargs)
        finally:
            self.seconds[part] += self._clock() - began


class Timed:
    """Stands in for a target, a drafter or a rule and times the methods in `parts` (method -> part of PARTS).

    Host clocks don't see a queue on an accelerator: use it where calls return when the work is done.
    """

    def __init__(self, inner: Any, parts: Mapping[str, str], watch: Stopwatch) -> None:
        self._inner, self._parts, self._watch = inner, parts, watch

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in self._parts:
            return found

        def timed(*args: Any, **kwargs: Any) -> Any:
            result = self._watch.call(self._parts[name], found, *args, **kwargs)
            if self._parts[name] == "draft" and result is not None:
                self._watch.deepest = max(self._watch.deepest, result.tree.max_depth)
            return result

        return timed
