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

    share   of the examples that an epoch has, drawn anew for each
    """

    def __init__(self, num_examples: int, batch_size: int, seed: int, share: float = 1.0) -> None:
        self._num_all = num_examples
        num_examples = max(1, round(share * num_examples))
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
            self._permutation_N = self._drawn(np.random.default_rng([self.seed, epoch]))
            self._epoch = epoch
        return self._permutation_N

    def _drawn(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """The examples of one epoch in order."""
        return rng.permutation(self._num_all)[: self.num_examples]


class TextOrder(Order):
    """Texts in a shuffled order, of each some of its examples: those of one text stand together, as they share it.

    texts_N   the text of each example; those of one text are neighbours
    """

    def __init__(self, texts_N: NDArray[np.int64], batch_size: int, seed: int, share: float) -> None:
        changes_N = np.flatnonzero(np.diff(texts_N, prepend=-1))
        counts_S = np.diff(changes_N, append=len(texts_N))
        self._text_N = np.repeat(np.arange(len(counts_S)), counts_S)
        self._first_S = changes_N
        self._taken_S = np.maximum(1, np.round(share * counts_S)).astype(np.int64)
        super().__init__(int(self._taken_S.sum()), batch_size, seed)

    def _drawn(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """Of each text as many as its share, in their order in the text."""
        by_chance_N = np.lexsort((rng.random(len(self._text_N)), self._text_N))
        rank_N = np.arange(len(self._text_N)) - self._first_S[self._text_N]
        taken = by_chance_N[rank_N < self._taken_S[self._text_N]]
        place_S = rng.permutation(len(self._taken_S))
        chosen: NDArray[np.int64] = taken[np.lexsort((taken, place_S[self._text_N[taken]]))]
        return chosen


def learning_rate(step: int, total_steps: int, settings: TrainSettings) -> float:
    """The rate of step `step` (from 0): a linear warm-up, then a cosine down to 0."""
    warmup = math.ceil(settings.warmup_ratio * total_steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, total_steps - warmup)
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * done))
