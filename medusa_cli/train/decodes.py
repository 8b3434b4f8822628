"""Real decodes while heads learn: when there is one, what it says, and the heads that decoded best.

How to decode is passed in: this room knows no loop. Which heads are kept and when training stops follow from tokens a
step alone, never from seconds, so that a run that goes on from a checkpoint ends like an unbroken one.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from medusa_cli.heads.medusa import MedusaHeads
from medusa_cli.recipe import TrainSettings

SHARE = 0.05
"""Of the time of training: what decodes take at most where they decide nothing, the first and the last left out."""


@dataclass(frozen=True)
class Decoded:
    """What decoding with the heads of one moment gave.

    tokens_per_step  tokens gained a step after the prefill, the bonus token included
    speedup          over plain decoding: tokens a step over what such a step costs here, in plain steps
    """

    tokens_per_step: float
    speedup: float


Decode = Callable[[MedusaHeads], Decoded]


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

    def offer(self, step: int, tokens_per_step: float, heads: MedusaHeads) -> None:
        """Keep a copy of these heads, on the host, if none decoded as well before."""
        if tokens_per_step > self.tokens_per_step:
            self.step, self.tokens_per_step, self.waited = step, tokens_per_step, 0
            self.heads = {name: value.detach().to("cpu", copy=True) for name, value in heads.state_dict().items()}
        else:
            self.waited += 1

    def give_to(self, heads: MedusaHeads) -> None:
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

    def __init__(self, decode: Decode | None, settings: TrainSettings, best: Best | None) -> None:
        self.best = best
        self.seconds = 0.0
        self._decode = decode if settings.decode_steps else None
        self._every = settings.decode_steps
        self._began = time.perf_counter()
        self._spent = 0.0

    @property
    def given_up(self) -> bool:
        """Whether patience is at its end."""
        return self.best is not None and self.best.given_up

    def after(self, step: int, heads: MedusaHeads, *, last: bool) -> Decoded | None:
        """What a decode after this step gave, its `seconds` kept; None where none is due or it would cost too much."""
        if self._decode is None or not (last or step % self._every == 0):
            return None
        if self.best is None and not last and self._too_dear():
            return None
        begun = time.perf_counter()
        decoded = self._decode(heads)
        self.seconds = time.perf_counter() - begun
        self._spent += self.seconds
        if self.best is not None:
            self.best.offer(step, decoded.tokens_per_step, heads)
        return decoded

    def _too_dear(self) -> bool:
        """Whether one more, as long as the one before, would take more than the share that decodes may have."""
        return self._spent > 0 and self._spent + self.seconds > SHARE * (time.perf_counter() - self._began)
