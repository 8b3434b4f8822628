"""What happens while heads learn, as events: who makes them, and where they go.

Shape letters: K heads.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, Protocol

from medusa_cli.config.recipe import TrainSettings
from medusa_cli.train.checkpoint import TrainLog
from medusa_cli.train.early_stopping import Decoded, Decoding
from medusa_cli.train.loss import Scores
from medusa_cli.train.order import Order, learning_rate


@dataclass(frozen=True)
class Event:
    """Something that happened after `step` steps of `total_steps`.

    kind                  train: a step; eval: held-out examples were looked at; decode: held-out prompts were decoded;
                          save: a checkpoint was written
    loss, loss_K, top1_K  of the step's batch or of the held-out examples; else None. Per head, over the tokens of the
                          draft vocabulary only
    examples_per_second   since this process began to train
    seconds_left          at that pace
    conditional_K         of the held-out examples: `chain_accuracy`
    tokens_per_step, speedup, decode_seconds   of a decode, as `Decoded`, and what it took
    best_step, waited     of a decode, with patience: the step whose heads decode best, and decodes since
    """

    kind: Literal["train", "eval", "decode", "save"]
    step: int
    total_steps: int
    epoch: float
    learning_rate: float
    loss: float | None
    loss_K: list[float | None] | None
    top1_K: list[float] | None
    examples_per_second: float
    seconds_left: float
    conditional_K: list[float] | None = None
    tokens_per_step: float | None = None
    speedup: float | None = None
    decode_seconds: float | None = None
    best_step: int | None = None
    waited: int | None = None


class Reporter(Protocol):
    """Somewhere outside that wants the curves."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take the named numbers of a step."""


@dataclass(frozen=True)
class Outlets:
    """Where news goes: a callback, a log file, and maybe a reporter; and whether the user asks to stop.

    A run that is asked to stop saves after the step it is at and ends with KeyboardInterrupt.
    """

    on_event: Callable[[Event], None]
    log: TrainLog
    reporter: Reporter | None = None
    stop_asked: Callable[[], bool] = bool

    def send(self, event: Event) -> None:
        """Give one event to all."""
        values = {name: value for name, value in asdict(event).items() if value is not None}
        self.log.append(values)
        if self.reporter is not None and event.kind != "save":
            self.reporter.log(_flat(event), event.step)
        self.on_event(event)


@dataclass(frozen=True)
class Evaluated:
    """Scores on held-out examples, and each head's share of right guesses where all before were right."""

    scores: Scores
    conditional_K: list[float]


class News:
    """Makes events: knows how far the run is and how fast it goes."""

    def __init__(self, order: Order, total_steps: int, first: int, settings: TrainSettings) -> None:
        self._order = order
        self._total_steps = total_steps
        self._first = first
        self._settings = settings
        self._began = time.perf_counter()

    def evaluated(self, step: int, found: Evaluated) -> Event:
        """An evaluation after `step` steps."""
        return replace(self.event("eval", step, found.scores), conditional_K=found.conditional_K)

    def decoded(self, step: int, decoded: Decoded, decoding: Decoding) -> Event:
        """The event of a decode after `step` steps."""
        best = decoding.best
        return replace(
            self.event("decode", step, None),
            **asdict(decoded),
            decode_seconds=decoding.seconds,
            best_step=best.step if best else None,
            waited=best.waited if best else None,
        )

    def event(self, kind: Literal["train", "eval", "decode", "save"], step: int, scores: Scores | None) -> Event:
        """The event after `step` steps."""
        seconds = max(time.perf_counter() - self._began, 1e-9)
        done = step - self._first
        return Event(
            kind=kind,
            step=step,
            total_steps=self._total_steps,
            epoch=step * self._order.batch_size / self._order.num_examples,
            learning_rate=learning_rate(max(step - 1, 0), self._total_steps, self._settings),
            loss=None if scores is None else scores.mean_loss,
            loss_K=None if scores is None else scores.mean_loss_K,
            top1_K=None if scores is None else scores.top1_K.tolist(),
            examples_per_second=done * self._order.batch_size / seconds,
            seconds_left=(self._total_steps - step) * seconds / max(done, 1),
        )


def _flat(event: Event) -> dict[str, float]:
    """An event's numbers by name, one level deep."""
    names = ("tokens_per_step", "speedup") if event.kind == "decode" else ("loss", "learning_rate")
    numbers_of: dict[str, float | None] = {name: getattr(event, name) for name in names}
    values: dict[str, float] = {f"{event.kind}/{name}": one for name, one in numbers_of.items() if one is not None}
    by_head: dict[str, Sequence[float | None] | None] = {
        "loss": event.loss_K, "top1": event.top1_K, "conditional": event.conditional_K,
    }  # fmt: skip
    for name, numbers in by_head.items():
        of_heads = {f"{event.kind}/{name}_head_{head}": one for head, one in enumerate(numbers or [], start=1)}
        values |= {name: one for name, one in of_heads.items() if one is not None}
    return values
