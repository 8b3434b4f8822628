"""Texts being written for `medusa generate`: several at once, shown in the order of their prompts."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from medusa_cli.cli.console import Console

if TYPE_CHECKING:
    from torch import Tensor

    from medusa_cli.bench.compare import Difference
    from medusa_cli.data.conversations import Message
    from medusa_cli.decode.loop import Generation, Parts
    from medusa_cli.decode.rows import FindStop, Limits
    from medusa_cli.decode.text import TextStream
    from medusa_cli.target.model import Target


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
    difference: "Difference | None" = None

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens a step, the bonus token included; the prefill's token is no step's."""
        made = self.generation
        return sum(made.kept) / made.num_steps if made.num_steps else None

    @property
    def summary(self) -> str:
        """One line."""
        made, number = self.generation, len(self.generation.token_ids)
        steps = f"{made.num_steps} steps, {self.tokens_per_step:.2f} tokens a step" if made.num_steps else "no step"
        rate = number / self.duration
        return f"{number} tokens in {self.duration:.1f} s ({rate:.1f} tokens/s), {steps}, {made.finish_reason}"


def write_answers(parts: "Parts", asked: "Sequence[Sequence[Message]]", wish: Wish, console: Console) -> list[Answer]:
    """Decode every prompt, `batch_size` at once. Raises DataError for one that can't be asked, before any is."""
    from medusa_cli.decode.loop import check_prompt, decode, generation_of
    from medusa_cli.decode.room import check_room
    from medusa_cli.decode.text import TextStream

    prompts = [_ids_of(parts.target, messages, wish.chat) for messages in asked]
    limits = _limits(parts.target, wish)
    for number, prompt in enumerate(prompts, start=1):
        check_prompt(parts.target, prompt, limits, f"prompt {number}" if len(prompts) > 1 else "the prompt")
    rows = min(wish.batch_size, len(prompts))
    check_room(parts.target, prompts, limits, rows, parts.drafter.size)
    texts = [_Text(TextStream(parts.target.tokenizer, wish.stops)) for _ in prompts]
    turns = _Turns(console, wish.stream, texts)
    answers: dict[int, Answer] = {}
    for gain in decode(parts, _joining(prompts, texts), limits, rows):
        key, text = gain.row.key, texts[gain.row.key]
        turns.take(key, text.stream.feed(gain.tokens))
        if gain.row.finish_reason is not None:
            turns.take(key, text.stream.flush())
            duration = time.perf_counter() - text.begun
            question, made = asked[key][-1].content, generation_of(gain.row)
            answers[key] = Answer(question, len(prompts[key]), "".join(text.pieces), made, duration)
            turns.end(key, answers[key].summary)
    written = [answers[key] for key in range(len(prompts))]
    return _checked(parts, prompts, written, limits, rows) if wish.check else written


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
        seen = parts.target.prefill([row.tokens], parts.target.new_cache(1, len(row.tokens)))
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
    if chat and not messages[-1].content.strip():
        raise DataError("the prompt is empty", "say something; --no-chat lets a base model start from nothing")
    return prompt_ids(target.tokenizer, messages, chat=chat)


def _limits(target: "Target", wish: Wish) -> "Limits":
    """Where texts end."""
    from medusa_cli.decode.rows import Limits

    stop_ids = frozenset[int]() if wish.ignore_eos else target.stop_ids
    return Limits(wish.max_new_tokens, stop_ids, target.context_limit, _find_stop(target, wish.stops))


def _find_stop(target: "Target", texts: Sequence[str]) -> "FindStop | None":
    """The stop strings as the loop takes them."""
    from medusa_cli.decode.text import StopStrings

    if not texts:
        return None
    stops = StopStrings(texts, target.tokenizer)

    def find_stop(so_far: Sequence[int], new: Sequence[int]) -> int | None:
        hit = stops.find(so_far, new)
        return hit.num_new if hit else None

    return find_stop


@dataclass
class _Text:
    """A text that grows; the first `shown` of its pieces have been shown. `summary` is set when it is whole."""

    stream: "TextStream"
    pieces: list[str] = field(default_factory=list)
    shown: int = 0
    begun: float = 0.0
    summary: str | None = None


def _joining(prompts: Sequence[list[int]], texts: Sequence[_Text]) -> Iterator[list[int]]:
    """The prompts; each text's clock starts when the loop takes its prompt."""
    for prompt, text in zip(prompts, texts, strict=True):
        text.begun = time.perf_counter()
        yield prompt


class _Turns:
    """Shows the first text that isn't whole yet; those behind it wait for their turn."""

    def __init__(self, console: Console, stream: bool, texts: Sequence[_Text]) -> None:
        self._console = console
        self._stream = stream
        self._texts = texts
        self._turn = 0

    def take(self, key: int, piece: str) -> None:
        """A text has grown."""
        self._texts[key].pieces.append(piece)
        if key == self._turn and self._stream:
            self._show(self._texts[key])

    def end(self, key: int, summary: str) -> None:
        """A text is whole: show it if it is its turn, and what waited for it."""
        self._texts[key].summary = summary
        while self._turn < len(self._texts) and (line := self._texts[self._turn].summary) is not None:
            self._show(self._texts[self._turn])
            self._console.stream("\n")
            self._console.info(line)
            self._turn += 1
        if self._turn < len(self._texts) and self._stream:
            self._show(self._texts[self._turn])

    def _show(self, text: _Text) -> None:
        self._console.stream("".join(text.pieces[text.shown :]))
        text.shown = len(text.pieces)
