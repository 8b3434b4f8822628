"""Real decodes while heads learn: when there is one, what it says, and the heads that decoded best.

How to decode is passed in: this room knows no loop. Which heads are kept and when training stops follow from tokens a
step alone, never from seconds, so that a run that goes on from a checkpoint ends like an unbroken one.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from medusa_cli.config.recipe import TrainSettings
from medusa_cli.heads.base import Heads

MOST = 8
"""Decodes of a run where they decide nothing, the last left out: a clock would make logs of equal runs differ."""


@dataclass(frozen=True)
class Decoded:
    """What decoding with the heads of one moment gave.

    tokens_per_step  tokens gained a step after the prefill, the bonus token included
    speedup          over plain decoding: tokens a step over what such a step costs here, in plain steps
    """

    tokens_per_step: float
    speedup: float


Decode = Callable[[Heads], Decoded]


@dataclass
class Best:
    """The heads that decoded best, and how many decodes since were no better. Travels in the checkpoints."""

    patience: int
    step: int = 0
    tokens_per_step: float = 0.0
    waited: int = 0
    heads: dict[str, Tensor] = field(default_factory=dict)

    @property
    def given_up(self) -> bool:
        """Whether training has gone on for long enough without a better decode."""
        return self.waited >= self.patience

    def offer(self, step: int, tokens_per_step: float, heads: Heads) -> None:
        """Keep a copy of these heads, on the host, if none decoded as well before."""
        if tokens_per_step > self.tokens_per_step:
            self.step, self.tokens_per_step, self.waited = step, tokens_per_step, 0
            self.heads = {name: value.detach().to("cpu", copy=True) for name, value in heads.state_dict().items()}
        else:
            self.waited += 1

    def give_to(self, heads: Heads) -> None:
        """Make `heads` the best ones, if there was a decode at all."""
        if self.heads:
            heads.load_state_dict(self.heads)

    def content(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {name: getattr(self, name) for name in ("step", "tokens_per_step", "waited", "heads")}

    def fill(self, content: Mapping[str, Any]) -> None:
        """Take over what a checkpoint holds."""
        for name, value in content.items():
            setattr(self, name, value)


class Decoding:
    """Decodes when it is time for it."""

    def __init__(self, decode: Decode | None, settings: TrainSettings, best: Best | None, total_steps: int) -> None:
        self.best = best
        self.seconds = 0.0
        self._decode = decode if settings.decode_steps else None
        self._every = steps_between(settings, total_steps)

    @property
    def given_up(self) -> bool:
        """Whether patience is at its end."""
        return self.best is not None and self.best.given_up

    def after(self, step: int, heads: Heads, *, last: bool) -> Decoded | None:
        """What a decode after this step gave, its `seconds` kept; None where none is due."""
        if self._decode is None or not (last or step % self._every == 0):
            return None
        begun = time.perf_counter()
        decoded = self._decode(heads)
        self.seconds = time.perf_counter() - begun
        if self.best is not None:
            self.best.offer(step, decoded.tokens_per_step, heads)
        return decoded


def steps_between(settings: TrainSettings, total_steps: int) -> int:
    """Steps from one decode to the next: as asked for where they decide, else so many times that, for MOST at most."""
    if settings.patience or not settings.decode_steps:
        return settings.decode_steps
    return settings.decode_steps * max(1, -(-total_steps // (settings.decode_steps * (MOST + 1))))
