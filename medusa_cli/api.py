"""The Python API: a target with its heads as an object that writes texts. `import medusa_cli` shows what is here.

An object may be used from several threads, and its streams may be read in turn: their texts are written side by side.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from medusa_cli.acceptance.logits_processors import stop_strings_of
from medusa_cli.acceptance.random_streams import Stream
from medusa_cli.acceptance.sampling import Choosing
from medusa_cli.assemble import DrafterChoice, Speculate, adapter_for, check_choice, load_drafter, load_target_for
from medusa_cli.choosing import Sampling, check_sampling, load_choosing
from medusa_cli.config.loading import load_recipe
from medusa_cli.config.parts import FUNCTION
from medusa_cli.config.recipe import COLDEST, NEW_TOKENS, TargetSettings
from medusa_cli.contracts import Drafter
from medusa_cli.data.conversations import Message, is_text
from medusa_cli.decode.chat import Ends, ends_of, ids_of
from medusa_cli.decode.engine import Request, Stats
from medusa_cli.decode.hf_generate import Call
from medusa_cli.decode.loop import Generation, generation_of
from medusa_cli.decode.shared_engine import SharedEngine
from medusa_cli.drafters.function import Guess
from medusa_cli.drafters.source import Wishes
from medusa_cli.errors import DataError, RecipeError, TargetError
from medusa_cli.model.attention import NAME as GROUPED
from medusa_cli.model.loading.load import make_target
from medusa_cli.model.loading.refusals import refuse_config
from medusa_cli.model.loading.self_check import checked
from medusa_cli.model.target import Target

Prompt = str | Sequence[Mapping[str, str]]
"""A user's words, or the messages of a chat: [{"role": "user", "content": "Hi"}]."""

ROWS = 8


class Options(TypedDict, total=False):
    """How texts are wanted; each by the name of `medusa generate`'s flag, with the same default.

    chat     None: through the chat template where the model has one
    stop     a text ends before the first of these strings
    """

    max_new_tokens: int
    temperature: float
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    acceptance: Literal["greedy", "lossless", "typical"] | None
    min_new_tokens: int
    ignore_eos: bool
    seed: int
    stop: str | Sequence[str]
    chat: bool | None


@dataclass(frozen=True)
class Reply:
    """One text. `tokens_per_step` is None where there was no step: the first token comes with reading the prompt."""

    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]
    num_steps: int
    tokens_per_step: float | None


def load(
    model: str = TargetSettings.model_fields["model"].default,
    heads: str | Path | None = None,
    drafter: str | Guess | None = None,
    *,
    tree: str | None = None,
    tree_size: int | None = None,
    speculate: Speculate = "auto",
    draft_model: str | None = None,
    drafter_errors: Literal["warn", "raise"] = "warn",
    batch_size: int = ROWS,
    **target: Any,
) -> "Medusa":
    """The model by alias, folder, .gguf file or hub id, with its heads: as `medusa generate` loads it.

    heads, tree, tree_size, speculate, draft_model, drafter_errors   as the flags of these names
    drafter      as the flag of this name; or a function from token ids so far to those that may follow
    batch_size   texts written side by side at most; the memory of so many is held while any is written
    target       revision, dtype, device, runner, attention, device_map, quantize: settings of a recipe's `target`

    Raises MedusaError: its subclasses say what is wrong with what.
    """
    recipe = load_recipe(None, (), {"target.model": model, **{f"target.{name}": each for name, each in target.items()}})
    choice = _choice(heads, drafter, tree, tree_size, speculate, Wishes(draft_model, drafter_errors))
    check_choice(choice, recipe.target.model)
    found = load_target_for(choice, recipe.target)
    return Medusa(found, load_drafter(choice, found), batch_size)


def attach(
    hf_model: Any,
    tokenizer: Any,
    heads: str | Path | None = None,
    drafter: str | Guess | None = None,
    *,
    tree: str | None = None,
    tree_size: int | None = None,
    speculate: Speculate = "auto",
    draft_model: str | None = None,
    drafter_errors: Literal["warn", "raise"] = "warn",
    batch_size: int = ROWS,
) -> "Medusa":
    """A transformers model that is in memory already, with heads; its weights are neither copied nor changed.

    The model stays usable by itself, its `generate` gives what it gave before. What is changed: it is put into eval
    mode (and must be in it whenever texts are written), and a hook before its output matrix looks at what passes.

    Raises MedusaError as `load`, and RecipeError for heads that come with an adapter, which would change the weights.
    """
    name = str(getattr(hf_model, "name_or_path", "")) or "the attached model"
    refuse_config(hf_model.config, name)
    attention = hf_model.config._attn_implementation
    if attention not in ("eager", "sdpa", GROUPED):
        raise TargetError(
            f"{name} was loaded with {attention} attention, which takes no mask of a tree",
            'load it with attn_implementation="sdpa" or "eager"',
        )
    choice = _choice(heads, drafter, tree, tree_size, speculate, Wishes(draft_model, drafter_errors))
    if adapter_for(choice, name) is not None:
        raise RecipeError(
            "these heads come with an adapter, which would change the model's weights",
            "load the model by medusa.load, which merges it, or merge it with peft and name other heads",
        )
    learnt = [parameter for parameter in hf_model.parameters() if parameter.requires_grad]
    target = make_target(hf_model, tokenizer, TargetSettings(model=name, runner="eager"))
    for parameter in learnt:
        parameter.requires_grad_(True)
    checked(target)
    return Medusa(target, load_drafter(choice, target), batch_size)


class Medusa:
    """A model that writes several tokens a forward: `generate`, `stream`, and `custom_generate` for transformers."""

    def __init__(self, target: Target, drafter: Drafter, batch_size: int) -> None:
        if batch_size < 1:
            raise RecipeError(f"batch_size is {batch_size}", "it is a number of texts, at least 1")
        self._target, self._drafter = target, drafter
        self._engine = SharedEngine(target, drafter, batch_size)

    @property
    def model(self) -> Any:
        """The transformers model. One from `load` may have linear layers of ours; `generate` of its own works too."""
        return self._target.model

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer."""
        return self._target.tokenizer

    @property
    def drafter(self) -> str:
        """Who guesses, by the name of --drafter."""
        return self._drafter.name

    def stats(self) -> Stats:
        """Rows, queue, cache columns and steps since no text was being written."""
        return self._engine.stats()

    def generate(self, prompts: Prompt | Sequence[Prompt], **options: Unpack[Options]) -> list[Reply]:
        """A reply to each prompt, written side by side. One prompt, a string or a list of messages, is taken as well.

        Text `n` of a call is the one that `medusa generate` writes for prompt `n` of a file, sampled or not.
        """
        asked = _Asked.of(self._target, options)
        requests = [asked.request(prompt, key) for key, prompt in enumerate(_several(prompts))]
        self._check_mode()
        rows = {index: gain.row for index, gain in self._engine.write(requests)}
        return [_reply(asked.ends, generation_of(rows[index])) for index in range(len(requests))]

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Iterator[str]:
        """The reply in pieces, as it is written. A stream that is closed early gives its place to others."""
        asked = _Asked.of(self._target, options)
        request = asked.request(prompt, 0)
        self._check_mode()
        return self._pieces(request, asked.ends)

    def custom_generate(
        self,
        model: Any,
        input_ids: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """For `model.generate(**inputs, custom_generate=this)`: the ids that generate would return.

        Raises RecipeError for what can't be kept to. A `streamer` and an `assistant_model` are not handed on by
        transformers, so these do nothing here: use `stream`.
        """
        if model is not self._target.model:
            raise RecipeError("custom_generate belongs to another model", "call generate of the model it was made for")
        self._check_mode()
        call = Call(self._target, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
        requests = call.requests()
        rows = {index: gain.row for index, gain in self._engine.write(requests)}
        return call.padded([rows[index].new_tokens for index in range(len(requests))])

    def _pieces(self, request: Request, ends: Ends) -> Iterator[str]:
        text = ends.stream()
        with closing(self._engine.write([request])) as gains:
            for _, gain in gains:
                if piece := text.feed(gain.tokens):
                    yield piece
        if piece := text.flush():
            yield piece

    def _check_mode(self) -> None:
        """Raise TargetError where dropout would be part of the text."""
        if self._target.model.training:
            raise TargetError(f"{self._target.name} is in training mode", "call model.eval() first")


@dataclass(frozen=True)
class _Asked:
    """How the texts of one call are wanted."""

    target: Target
    ends: Ends
    choosing: Choosing
    seed: int
    chat: bool | None

    @classmethod
    def of(cls, target: Target, options: Options) -> "_Asked":
        """Raises RecipeError for numbers that mean nothing, TypeError for names that nobody knows."""
        if unknown := options.keys() - Options.__annotations__.keys():
            raise TypeError(f"no such option: {', '.join(sorted(unknown))}")
        named = {each.name for each in fields(Sampling)}
        chosen_by: dict[str, Any] = {name: value for name, value in options.items() if name in named}
        sampling = Sampling(**chosen_by)
        budget = options.get("max_new_tokens", NEW_TOKENS)
        _check_numbers(sampling, budget)
        check_sampling(sampling)
        chosen = load_choosing(sampling, target)
        stop = options.get("stop", ())
        stops = ((stop,) if isinstance(stop, str) else tuple(stop)) + stop_strings_of(target.model.generation_config)
        ends = ends_of(target, budget, stops, ignore_eos=options.get("ignore_eos", False))
        choosing = Choosing(chosen.rule, chosen.shaping)
        return cls(target, ends, choosing, options.get("seed", 0), options.get("chat"))

    def request(self, prompt: Prompt, key: int) -> Request:
        """The text after the prompt with this place in its call. Raises DataError for one that can't be asked."""
        messages = _messages(prompt)
        if not messages[-1].content.strip() and self.chat is not False:
            raise DataError("the prompt is empty", "write what is asked, or chat=False")
        ids = ids_of(self.target, messages, self.chat)
        return Request(ids, self.ends.limits, self.choosing, Stream(self.seed, key))


def _choice(
    heads: str | Path | None,
    drafter: str | Guess | None,
    tree: str | None,
    tree_size: int | None,
    speculate: Speculate,
    wishes: Wishes,
) -> DrafterChoice:
    if drafter is not None and not isinstance(drafter, str):
        named = drafter if hasattr(drafter, "__qualname__") else type(drafter)
        wishes = replace(wishes, function=drafter)
        drafter = FUNCTION + re.sub(r"[^\w.:]", "", f"{named.__module__}:{named.__qualname__}")
    return DrafterChoice(drafter, None if heads is None else str(heads), tree, tree_size, speculate, wishes)


def _several(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Prompts in a list, also where one is given: words, or messages."""
    one: Any = prompts
    return [one] if isinstance(one, str) or (one and isinstance(one[0], Mapping)) else one


def _messages(prompt: Prompt) -> list[Message]:
    """What a chat template is given. Raises DataError for what is neither words nor messages."""
    given: Any = (
        [{"role": "user", "content": prompt}]
        if isinstance(prompt, str)
        else list(prompt)
        if isinstance(prompt, Sequence)
        else []
    )
    if not given or not all(
        isinstance(each, Mapping) and all(isinstance(each.get(name), str) for name in ("role", "content"))
        for each in given
    ):
        raise DataError(
            "a prompt is neither text nor messages", 'give a string, or [{"role": "user", "content": "Hi"}]'
        )
    if not all(is_text(each["content"]) for each in given):
        raise DataError("the prompt holds halves of characters", "give it as Unicode text")
    return [Message(each["role"], each["content"]) for each in given]


def _reply(ends: Ends, made: Generation) -> Reply:
    per_step = sum(made.kept) / made.num_steps if made.num_steps else None
    return Reply(ends.text(made.token_ids), made.token_ids, made.finish_reason, made.num_steps, per_step)


def _check_numbers(asked: Sampling, budget: int) -> None:
    """Raise RecipeError for numbers that mean nothing."""
    shares = {name: value for name, value in asdict(asked).items() if name in ("top_p", "min_p") and value is not None}
    faults = {
        "max_new_tokens": budget < 1 and "at least 1",
        "min_new_tokens": asked.min_new_tokens < 0 and "at least 0",
        "temperature": not (asked.temperature == 0 or COLDEST <= asked.temperature < math.inf) and "0, or above",
        "top_k": (asked.top_k or 0) < 0 and "at least 0; 0 keeps all",
        "repetition_penalty": asked.repetition_penalty is not None
        and not 0 < asked.repetition_penalty < math.inf
        and "above 0; 1 changes nothing",
        **{name: not 0 < value <= 1 and "a share: above 0, at most 1" for name, value in shares.items()},
    }
    for name, allowed in faults.items():
        if allowed:
            raise RecipeError(f"{name} means nothing as it is", f"it must be {allowed}")
