"""One reply: how it is wanted, what it took, and what whoever writes it must be able to do."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from medusa_cli.cli.console import span
from medusa_cli.cli.wishes import ChoosingFlags, EndingFlags

if TYPE_CHECKING:
    from medusa_cli.data.conversations import Message

STOPPED = "interrupted"  # a finish reason, beside those of a text that ended by itself
BROKEN = "error"


@dataclass(frozen=True)
class Manner:
    """How replies are wanted: where they end, how tokens are chosen, and the seed of what is drawn."""

    ending: EndingFlags
    choosing: ChoosingFlags
    seed: int

    def check(self) -> None:
        """Raise typer.BadParameter for numbers that mean nothing."""
        self.ending.check()
        self.choosing.check()


@dataclass
class Reply:
    """One reply as it grows. Counts that nobody told are None.

    number          replies that were asked for before it; with the seed it says what is drawn
    stepped         tokens that came with steps: the first one comes with the reading of the prompt
    finish_reason   stop or length as everywhere, STOPPED or BROKEN; None while it grows
    first, ended    when the first token came, and when the reply ended
    """

    number: int
    begun: float = field(default_factory=time.perf_counter)
    text: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    num_steps: int | None = None
    stepped: int = 0
    finish_reason: str | None = None
    first: float | None = None
    ended: float | None = None

    def add(self, piece: str) -> None:
        """It has grown."""
        self.text += piece

    def saw_token(self) -> None:
        """A token has come, whether it shows or not."""
        self.first = self.first or time.perf_counter()

    def end(self) -> None:
        """It grows no more."""
        self.ended = time.perf_counter()

    @property
    def duration(self) -> float:
        """Seconds from the question to the end."""
        return (self.ended or time.perf_counter()) - self.begun

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from the question to the first token."""
        return None if self.first is None else self.first - self.begun

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens a step, the bonus token included."""
        return self.stepped / self.num_steps if self.num_steps else None

    @property
    def generation_throughput(self) -> float | None:
        """Tokens a second once the first is there."""
        waited, tokens = self.time_to_first_token, self.completion_tokens
        if waited is None or tokens is None or tokens < 2:
            return None
        return (tokens - 1) / max(self.duration - waited, 1e-9)

    @property
    def summary(self) -> str:
        """One line of what it took, of what is known."""
        tokens, rate, a_step, waited = (
            self.completion_tokens,
            self.generation_throughput,
            self.tokens_per_step,
            self.time_to_first_token,
        )
        parts = [] if tokens is None else [f"{tokens:,} token{'s' * (tokens != 1)}"]
        parts += [] if rate is None else [f"{rate:.1f}/s"]
        parts += [] if a_step is None else [f"{a_step:.2f} a step"]
        parts += [] if waited is None else [f"first after {span(waited)}"]
        return ", ".join(parts or [span(self.duration)])

    def document(self) -> dict[str, Any]:
        """As JSON, with the names of the contract."""
        tokens = self.completion_tokens
        return {
            "text": self.text,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": tokens,
            "finish_reason": self.finish_reason,
            "num_steps": self.num_steps,
            "tokens_per_step": self.tokens_per_step,
            "output_throughput": None if tokens is None else tokens / max(self.duration, 1e-9),
            "generation_throughput": self.generation_throughput,
            "duration": self.duration,
            "time_to_first_token": self.time_to_first_token,
        }


class Partner(Protocol):
    """Who writes the replies. `name`: the model's; `context`: tokens it holds, where that is known."""

    name: str
    context: int | None

    def check(self, manner: Manner, system: str | None) -> None:
        """Raise MedusaError or typer.BadParameter for a manner or a system message that can't be followed."""

    def write(self, messages: "Sequence[Message]", manner: Manner, reply: Reply) -> Iterator[str]:
        """The words as they come, "" where there are none yet; fills in the reply's counts and how it ended.

        Raises MedusaError where it can't be written, or not to its end.
        """

    def stop(self) -> None:
        """The reply that is being written is not wanted any more. Called where Ctrl-C is heard."""

    def facts(self) -> dict[str, Any]:
        """What the JSON document says of it."""
