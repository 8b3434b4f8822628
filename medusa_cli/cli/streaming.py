"""Texts being written for `medusa generate`, several at once, and what each of them took."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from medusa_cli.cli.console import Console
from medusa_cli.cli.turns import GrowingText, Reading, Turns, joining

if TYPE_CHECKING:
    from torch import Tensor

    from medusa_cli.bench.compare import Difference
    from medusa_cli.data.conversations import Message
    from medusa_cli.decode.loop import Generation, Parts
    from medusa_cli.decode.rows import Limits
    from medusa_cli.model.target import Target


@dataclass(frozen=True)
class Wish:
    """How each text is wanted."""

    max_new_tokens: int
    chat: bool | None
    stops: tuple[str, ...]
    ignore_eos: bool
    stream: bool
    check: bool
    batch_size: int


@dataclass(frozen=True)
class Answer:
    """One text and what it took; `difference` to its plain decoding, where that was asked for and found one."""

    prompt: str
    prompt_tokens: int
    text: str
    generation: "Generation"
    duration: float
    time_to_first_token: float
    difference: "Difference | None" = None

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens a step, the bonus token included; the prefill's token is no step's."""
        made = self.generation
        return sum(made.kept) / made.num_steps if made.num_steps else None

    @property
    def prompt_throughput(self) -> float:
        """Prompt tokens read a second."""
        return self.prompt_tokens / self.time_to_first_token

    @property
    def generation_throughput(self) -> float | None:
        """Tokens written a second once the prompt is read; the first one came with the reading."""
        written = self.duration - self.time_to_first_token
        return (len(self.generation.token_ids) - 1) / written if self.generation.num_steps else None

    @property
    def summary(self) -> str:
        """One line: reading and writing apart."""
        read = (
            f"read {self.prompt_tokens:,} tokens in {self.time_to_first_token:.1f} s ({self.prompt_throughput:,.0f}/s)"
        )
        written = self.duration - self.time_to_first_token
        rate = f" in {written:.1f} s ({self.generation_throughput:.1f}/s)" if self.generation_throughput else ""
        steps = f", {self.tokens_per_step:.2f} a step" if self.tokens_per_step else ""
        return f"{read}, wrote {len(self.generation.token_ids):,}{rate}{steps}, {self.generation.finish_reason}"


def write_answers(parts: "Parts", asked: "Sequence[Sequence[Message]]", wish: Wish, console: Console) -> list[Answer]:
    """Decode every prompt, `batch_size` at once. Raises DataError for one that can't be asked, before any is."""
    from medusa_cli.decode.engine import check_prompt
    from medusa_cli.decode.loop import decode, generation_of
    from medusa_cli.decode.memory import check_room
    from medusa_cli.decode.text import TextStream

    prompts = [_ids_of(parts.target, messages, wish.chat) for messages in asked]
    limits = _limits(parts.target, wish)
    for number, prompt in enumerate(prompts, start=1):
        check_prompt(parts.target, prompt, limits, f"prompt {number}" if len(prompts) > 1 else "the prompt")
    rows = min(wish.batch_size, len(prompts))
    check_room(parts.target, prompts, limits, rows, parts.drafter.size)
    ends, tokenizer = _ends(parts.target, wish), parts.target.tokenizer
    texts = [GrowingText(messages[-1].content, TextStream(tokenizer, wish.stops, ends)) for messages in asked]
    turns = Turns(console, wish.stream, texts)
    answers: dict[int, Answer] = {}
    with Reading(console) as on_read:
        for gain in decode(replace(parts, on_read=on_read), joining(prompts, texts), limits, rows):
            key, text = gain.row.key, texts[gain.row.key]
            text.first = text.first or time.perf_counter()
            turns.take(key, text.stream.feed(gain.tokens))
            if gain.row.finish_reason is not None:
                turns.take(key, text.stream.flush())
                answers[key] = _answer(text, len(prompts[key]), generation_of(gain.row))
                turns.end(key, answers[key].summary)
    written = [answers[key] for key in range(len(prompts))]
    return _checked(parts, prompts, written, limits, rows) if wish.check else written


def _answer(text: GrowingText, prompt_tokens: int, made: "Generation") -> Answer:
    """A text that has just become whole."""
    duration = time.perf_counter() - text.begun
    return Answer(text.prompt, prompt_tokens, "".join(text.pieces), made, duration, text.first - text.begun)


def _checked(
    parts: "Parts", prompts: Sequence[list[int]], written: Sequence[Answer], limits: "Limits", max_rows: int
) -> list[Answer]:
    """The answers with where each differs from plain decoding."""
    from medusa_cli.bench.compare import difference
    from medusa_cli.decode.loop import collect
    from medusa_cli.drafters.none import NoDrafter

    plain = collect(replace(parts, drafter=NoDrafter()), prompts, limits, max_rows)
    return [
        replace(answer, difference=difference(
            answer.generation.token_ids, alone.token_ids, parts.target.dtype_name, _deciding(parts, prompt, limits)
        ))
        for prompt, answer, alone in zip(prompts, written, plain, strict=True)
    ]  # fmt: skip


def _deciding(parts: "Parts", prompt: list[int], limits: "Limits") -> "Callable[[list[int]], Tensor]":
    """New ids after this prompt to the logits [V] that decide the next: by one plain forward, and reworked."""
    import torch

    from medusa_cli.decode.rows import Row

    @torch.inference_mode()
    def logits_after(new_ids: list[int]) -> "Tensor":
        row = Row(0, [*prompt, *new_ids], len(prompt), limits)
        first = parts.target.tables.first_length(row.prompt_tokens, len(row.tokens))
        cache = parts.target.new_cache(1, len(row.tokens))
        seen = parts.target.prefill([row.tokens], cache, as_long_as=[first])
        logits_BV = seen.logits_BNV[:, 0]
        return logits_BV[0] if parts.shaping is None else parts.shaping.first(logits_BV, [row])[0]

    return logits_after


def _ids_of(target: "Target", messages: "Sequence[Message]", chat: bool | None) -> list[int]:
    """The prompt's ids. Raises DataError for a prompt the model can't be asked."""
    from medusa_cli.data.tokens import prompt_ids
    from medusa_cli.errors import DataError

    has_template = bool(target.tokenizer.chat_template)
    if chat and not has_template:
        raise DataError(f"{target.name} has no chat template", "leave out --chat: the prompt is taken as plain text")
    chat = has_template if chat is None else chat
    return prompt_ids(target.tokenizer, messages, chat=chat)


def _limits(target: "Target", wish: Wish) -> "Limits":
    """Where texts end."""
    from medusa_cli.decode.rows import Limits
    from medusa_cli.decode.stop_strings import StopStrings

    stop_ids = frozenset[int]() if wish.ignore_eos else target.stop_ids
    new_finder = StopStrings(wish.stops, target.tokenizer, _ends(target, wish)).finder if wish.stops else None
    return Limits(wish.max_new_tokens, stop_ids, target.context_limit, new_finder)


def _ends(target: "Target", wish: Wish) -> frozenset[int]:
    """Ids that end a turn and are no text; where they don't end it, those of them that are words are words."""
    if not wish.ignore_eos:
        return target.stop_ids
    return frozenset(target.stop_ids & target.tokenizer.added_tokens_decoder.keys())
