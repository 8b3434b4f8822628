"""Which examples each step of a training sees, and at which rate: functions of the step alone.

Shape letters: N examples, B examples of a step.
"""

import math

import numpy as np
from numpy.typing import NDArray

from medusa_cli.config.recipe import TrainSettings


class Order:
    """Which examples each step sees: one shuffled permutation after another, cut into batches.

    A pure function of the seed and the step, so going on needs no more than the step.
    """

    def __init__(self, num_examples: int, batch_size: int, seed: int) -> None:
        self.num_examples = num_examples
        self.batch_size = min(batch_size, num_examples)
        self.seed = seed
        self._epoch = -1
        self._permutation_N: NDArray[np.int64] = np.empty(0, np.int64)

    def rows(self, step: int) -> NDArray[np.int64]:
        """The examples of this step (from 0); a batch may run over the end of an epoch into the next."""
        start = step * self.batch_size
        epoch, cursor = divmod(start, self.num_examples)
        rows_B = self._permutation(epoch)[cursor : cursor + self.batch_size]
        missing = self.batch_size - len(rows_B)
        return np.concatenate([rows_B, self._permutation(epoch + 1)[:missing]]) if missing else rows_B

    def total_steps(self, epochs: float, max_steps: int | None) -> int:
        """Steps that see every example `epochs` times, or `max_steps` if that is fewer."""
        steps = max(1, math.ceil(epochs * self.num_examples / self.batch_size))
        return steps if max_steps is None else min(steps, max_steps)

    def state(self, total_steps: int) -> dict[str, int | float]:
        """What the order and the schedule depend on."""
        return {
            "num_examples": self.num_examples,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "total_steps": total_steps,
        }

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        """All examples in this epoch's order."""
        if epoch != self._epoch:
            self._permutation_N = np.random.default_rng([self.seed, epoch]).permutation(self.num_examples)
            self._epoch = epoch
        return self._permutation_N


def learning_rate(step: int, total_steps: int, settings: TrainSettings) -> float:
    """The rate of step `step` (from 0): a linear warm-up, then a cosine down to 0."""
    warmup = math.ceil(settings.warmup_ratio * total_steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, total_steps - warmup)
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * done))
