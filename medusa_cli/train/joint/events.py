"""What the joint training of heads and adapter (train/joint/loop.py) says and follows: settings, schedule, events.

Shape letters: K heads.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from medusa_cli.config.recipe import LoraSettings, TrainSettings
from medusa_cli.train.checkpoint import TrainLog
from medusa_cli.train.events import Reporter
from medusa_cli.train.kl_loss import Kept
from medusa_cli.train.loss import Scores
from medusa_cli.train.order import learning_rate


@dataclass(frozen=True)
class JointSettings:
    """How: the adapter's section, what it shares with the heads' own training, and the seed."""

    lora: LoraSettings
    train: TrainSettings
    seed: int


@dataclass(frozen=True)
class JointSeen:
    """What one reading gave: the heads' scores and the distance from the target's own predictions."""

    scores: Scores
    kept: Kept


def heads_weight(step: int, total_steps: int, lora: LoraSettings) -> float:
    """The weight of the heads' loss for the adapter at step `step` (from 0): a quarter of a sine up to its peak."""
    rising = lora.heads_warmup * total_steps
    return lora.heads_weight * math.sin(math.pi / 2 * min(1.0, step / rising if rising else 1.0))


def schedule(lora: LoraSettings) -> TrainSettings:
    """The schedule alone."""
    return TrainSettings(learning_rate=1.0, warmup_ratio=lora.warmup_ratio)


@dataclass(frozen=True)
class JointEvent:
    """Something that happened after `step` steps of `total_steps`; step 0 is an evaluation before any.

    kind                   train: a step; eval: held-out texts were read; save: a checkpoint was written
    loss, loss_K, top1_K   of the heads, as in `events.Event`; None for save
    divergence, agreement  KL from the target's own predictions in nats, and the share of places whose best token is
                           still the target's own
    heads_weight           of the heads' loss for the adapter in that step
    learning_rate          of the adapter
    """

    kind: Literal["train", "eval", "save"]
    step: int
    total_steps: int
    learning_rate: float
    heads_weight: float
    loss: float | None
    loss_K: list[float | None] | None
    top1_K: list[float] | None
    divergence: float | None
    agreement: float | None
    texts_per_second: float
    seconds_left: float


@dataclass(frozen=True)
class JointOutlets:
    """Where news goes: a callback, a log file, and maybe a reporter, whose steps go on from those of the heads; and
    whether the user asks to stop.
    """

    on_event: Callable[[JointEvent], None]
    log: TrainLog
    reporter: Reporter | None = None
    first_step: int = 0
    stop_asked: Callable[[], bool] = bool

    def send(self, event: JointEvent) -> None:
        """Give one event to all."""
        self.log.append({name: value for name, value in asdict(event).items() if value is not None})
        if self.reporter is not None and event.kind != "save":
            numbers = ("loss", "divergence", "agreement", "heads_weight", "learning_rate")
            found = {name: getattr(event, name) for name in numbers}
            values = {f"joint {event.kind}/{name}": float(one) for name, one in found.items() if one is not None}
            self.reporter.log(values, self.first_step + event.step)
        self.on_event(event)


class JointNews:
    """Makes events: knows how far the run is and how fast it goes."""

    def __init__(self, settings: JointSettings, total_steps: int, batch_size: int, first: int) -> None:
        self._settings = settings
        self._total_steps = total_steps
        self._batch_size = batch_size
        self._first = first
        self._began = time.perf_counter()

    def event(self, kind: Literal["train", "eval", "save"], step: int, seen: JointSeen | None) -> JointEvent:
        """The event after `step` steps."""
        seconds = max(time.perf_counter() - self._began, 1e-9)
        done, lora, last = step - self._first, self._settings.lora, max(step - 1, 0)
        return JointEvent(
            kind=kind,
            step=step,
            total_steps=self._total_steps,
            learning_rate=lora.learning_rate * learning_rate(last, self._total_steps, schedule(lora)),
            heads_weight=heads_weight(last, self._total_steps, lora),
            loss=None if seen is None else seen.scores.mean_loss,
            loss_K=None if seen is None else seen.scores.mean_loss_K,
            top1_K=None if seen is None else seen.scores.top1_K.tolist(),
            divergence=None if seen is None else float(seen.kept.divergence_P.mean()),
            agreement=None if seen is None else float(seen.kept.same_P.float().mean()),
            texts_per_second=done * self._batch_size / seconds,
            seconds_left=(self._total_steps - step) * seconds / max(done, 1),
        )
