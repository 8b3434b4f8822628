"""Texts being written for `medusa generate`, several at once, and what each of them took."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from medusa_cli.cli.console import Console, span
from medusa_cli.cli.turns import GrowingText, Reading, Turns, joining

if TYPE_CHECKING:
    from medusa_cli.data.conversations import Message
    from medusa_cli.decode.exactness import Difference
    from medusa_cli.decode.loop import Generation, Parts


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
        first = span(self.time_to_first_token)
        read = f"read {self.prompt_tokens:,} tokens in {first} ({self.prompt_throughput:,.0f}/s)"
        written = self.duration - self.time_to_first_token
        rate = f" in {span(written)} ({self.generation_throughput:.1f}/s)" if self.generation_throughput else ""
        steps = f", {self.tokens_per_step:.2f} a step" if self.tokens_per_step else ""
        return f"{read}, wrote {len(self.generation.token_ids):,}{rate}{steps}, {self.generation.finish_reason}"


def write_answers(parts: "Parts", asked: "Sequence[Sequence[Message]]", wish: Wish, console: Console) -> list[Answer]:
    """Decode every prompt, `batch_size` at once. Raises DataError for one that can't be asked, before any is."""
    from medusa_cli.decode.admission import check_prompt
    from medusa_cli.decode.chat import ends_of, ids_of
    from medusa_cli.decode.exactness import from_plain
    from medusa_cli.decode.loop import decode, generation_of
    from medusa_cli.decode.memory import check_room

    prompts = [ids_of(parts.target, messages, wish.chat) for messages in asked]
    ends = ends_of(parts.target, wish.max_new_tokens, wish.stops, ignore_eos=wish.ignore_eos)
    for number, prompt in enumerate(prompts, start=1):
        check_prompt(parts.target, prompt, ends.limits, f"prompt {number}" if len(prompts) > 1 else "the prompt")
    rows = min(wish.batch_size, len(prompts))
    check_room(parts.target, prompts, ends.limits, rows, parts.drafter.size)
    texts = [GrowingText(messages[-1].content, ends.stream()) for messages in asked]
    turns = Turns(console, wish.stream, texts)
    answers: dict[int, Answer] = {}
    with Reading(console) as on_read:
        for gain in decode(replace(parts, on_read=on_read), joining(prompts, texts), ends.limits, rows):
            key, text = gain.row.key, texts[gain.row.key]
            text.first = text.first or time.perf_counter()
            turns.take(key, text.stream.feed(gain.tokens))
            if gain.row.finish_reason is not None:
                turns.take(key, text.stream.flush())
                answers[key] = _answer(text, len(prompts[key]), generation_of(gain.row))
                turns.end(key, answers[key].summary)
    written = [answers[key] for key in range(len(prompts))]
    if not wish.check:
        return written
    found = from_plain(parts, prompts, [answer.generation for answer in written], ends.limits, rows)
    return [replace(answer, difference=difference) for answer, difference in zip(written, found, strict=True)]


def _answer(text: GrowingText, prompt_tokens: int, made: "Generation") -> Answer:
    """A text that has just become whole."""
    duration = time.perf_counter() - text.begun
    return Answer(text.prompt, prompt_tokens, "".join(text.pieces), made, duration, text.first - text.begun)
