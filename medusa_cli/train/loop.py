"""Training the heads on stored hidden states: the target itself is not here and is never touched.

Nothing prints: what happens is given to `on_event`, and written to train.jsonl. What a step does depends only on the
recipe, the seed and the step's number, so a run that goes on from a checkpoint ends bit-equal to an unbroken one.

Shape letters: N examples, B examples of a step, K heads.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from medusa_cli.errors import TrainingError
from medusa_cli.heads.medusa import MedusaHeads
from medusa_cli.recipe import TrainSettings
from medusa_cli.train.checkpoint import Checkpoints, TrainLog, TrainState
from medusa_cli.train.corpus import Examples
from medusa_cli.train.decodes import Best, Decode, Decoded, Decoding
from medusa_cli.train.loss import Scores, combine, score, score_and_learn
from medusa_cli.train.measure import chain_accuracy
from medusa_cli.train.parallel import ALONE, Group, Processes

EVAL_EXAMPLES = 8192
"""Held-out examples an evaluation looks at, at most: enough for a curve; measure.py looks at all of them."""


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
    loss_K: list[float] | None
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


def make_optimizer(heads: MedusaHeads, settings: TrainSettings) -> torch.optim.AdamW:
    """AdamW over the heads' parameters; only matrices decay."""
    named = [(name, parameter) for name, parameter in heads.named_parameters() if parameter.requires_grad]
    matrices: list[nn.Parameter] = [parameter for name, parameter in named if name.endswith("weight")]
    biases: list[nn.Parameter] = [parameter for name, parameter in named if not name.endswith("weight")]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": biases, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.learning_rate)


@dataclass(frozen=True)
class Sets:
    """Examples to learn from, examples kept for measuring, a decode of held-out prompts, if there are any, and the
    processes that learn from shares of the first.
    """

    train: Examples
    held_out: Examples
    decode: Decode | None = None
    group: Group = ALONE


def train(
    heads: MedusaHeads, sets: Sets, settings: TrainSettings, seed: int, checkpoints: Checkpoints, outlets: Outlets
) -> Event:
    """Train `heads` in place, going on from the run folder's newest checkpoint if it has one; the last evaluation.

    With patience, training may stop before its last step, and `heads` end as those that decoded best.
    Raises TrainingError when a number is not finite (naming the samples; the checkpoints and the log before it stay
    as they were), when the folder is another run's, or when it can't be written.
    """
    order = Order(len(sets.train), settings.batch_size, seed)
    total_steps = order.total_steps(settings.epochs, settings.max_steps)
    best = Best(settings.patience) if settings.patience else None
    state = TrainState(heads, make_optimizer(heads, settings), order.state(total_steps), best)
    heads.train().pack_output()
    first = checkpoints.restore(state)
    told = outlets.log.rewind(first)
    news = _News(order, total_steps, first, settings)
    if first and not told:  # the run was killed between a save and the news of it
        outlets.send(news.event("save", first, None))
    decoding = Decoding(sets.decode, settings, best)
    over = first == total_steps or decoding.given_up
    evaluated = news.evaluated(first, heads, sets.held_out) if over else None
    for step in range(first, first if over else total_steps):
        batch = Batch(step + 1, order.rows(step), learning_rate(step, total_steps, settings))
        sets.group.announce(step)
        scores = learn_batch(state, sets.train, batch, settings, sets.group)
        outlets.send(news.event("train", step + 1, scores))
        last = step + 1 == total_steps
        decoded = decoding.after(step + 1, heads, last=last)
        if decoded is not None:
            outlets.send(news.decoded(step + 1, decoded, decoding))
            last = last or decoding.given_up
        if last or (step + 1) % settings.eval_steps == 0:
            evaluated = news.evaluated(step + 1, heads, sets.held_out)
            outlets.send(evaluated)
        stopping = outlets.stop_asked()
        if last or stopping or (step + 1) % settings.save_steps == 0:
            checkpoints.save(step + 1, state)
            outlets.send(news.event("save", step + 1, None))
        if stopping and not last:
            raise KeyboardInterrupt
        if last:
            break
    sets.group.announce(None)
    if best is not None:
        best.give_to(heads)
    assert evaluated is not None
    return evaluated


def follow(
    heads: MedusaHeads,
    examples: Examples,
    settings: TrainSettings,
    seed: int,
    checkpoints: Checkpoints,
    group: Processes,
) -> None:
    """What every process but the leader, which is in `train`, does: its share of each step the leader announces.

    Goes on from the leader's checkpoint, and writes nothing. Raises TrainingError as `train` does, and when the
    leader is gone.
    """
    order = Order(len(examples), settings.batch_size, seed)
    total_steps = order.total_steps(settings.epochs, settings.max_steps)
    state = TrainState(heads, make_optimizer(heads, settings), order.state(total_steps))
    heads.train().pack_output()
    done = checkpoints.restore(state)
    for step in group.announced():
        if step != done:
            raise TrainingError(
                f"{checkpoints.folder} holds step {done} here, and the first process goes on from {step}",
                "put --output-dir on a disk that all machines share",
            )
        batch = Batch(step + 1, order.rows(step), learning_rate(step, total_steps, settings))
        learn_batch(state, examples, batch, settings, group)
        done += 1


@dataclass(frozen=True)
class Batch:
    """One step's number (from 1), examples and learning rate."""

    step: int
    rows_B: NDArray[np.int64]
    learning_rate: float


def learn_batch(state: TrainState, examples: Examples, batch: Batch, settings: TrainSettings, group: Group) -> Scores:
    """One batch: loss, gradient, check, update. The weights don't change when a number is not finite.

    This process's share is taken in pieces, and every gradient weighted by what the whole batch asks.
    """
    heads = state.heads
    device = heads.weight.device
    state.optimizer.zero_grad(set_to_none=True)
    whole_K = examples.counts(batch.rows_B).to(device)
    parts = [
        score_and_learn(
            heads,
            heads.inputs(examples.hidden(rows_B, device), examples.paths(rows_B, device)),
            examples.labels(rows_B, device),
            head_decay=settings.head_decay,
            chunk=settings.loss_chunk,
            whole_K=whole_K,
        )
        for rows_B in _pieces(batch.rows_B[group.share(len(batch.rows_B))], settings.micro_batch_size)
    ]
    scores = group.whole(combine(parts, settings.head_decay), len(batch.rows_B), settings.head_decay)
    group.sum_gradients(heads.parameters())
    _check_finite(scores, heads, examples, batch)
    for parameters in state.optimizer.param_groups:
        parameters["lr"] = batch.learning_rate
    state.optimizer.step()
    return scores


def _pieces(rows_B: NDArray[np.int64], size: int | None) -> list[NDArray[np.int64]]:
    """The rows in runs of `size` at most, or as they are; at least one run, which may be empty."""
    size = size or max(len(rows_B), 1)
    return [rows_B[start : start + size] for start in range(0, max(len(rows_B), 1), size)]


def _check_finite(scores: Scores, heads: MedusaHeads, examples: Examples, batch: Batch) -> None:
    """Raise TrainingError naming the samples of the batch whose loss or gradient is not finite."""
    gradients = [parameter.grad for parameter in heads.parameters() if parameter.grad is not None]
    if bool(torch.stack([scores.loss.isfinite(), *(grad.isfinite().all() for grad in gradients)]).all()):
        return
    bad_B = ~scores.pair_loss_BK.isfinite().all(1).cpu().numpy()
    names = examples.names(batch.rows_B[bad_B] if bad_B.any() else batch.rows_B)
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    raise TrainingError(
        f"step {batch.step}: the loss is not finite on {shown}",
        "look at these samples, or lower --learning-rate; the last checkpoint is whole (--resume-from-checkpoint)",
    )


@dataclass(frozen=True)
class _Evaluated:
    """Scores on held-out examples, and each head's share of right guesses where all before were right."""

    scores: Scores
    conditional_K: list[float]


def _evaluate(heads: MedusaHeads, examples: Examples, settings: TrainSettings) -> _Evaluated:
    """Of evenly spread held-out examples, the same ones each time."""
    rows = np.linspace(0, len(examples) - 1, min(len(examples), EVAL_EXAMPLES)).astype(np.int64)
    device = heads.weight.device
    parts = []
    for start in range(0, len(rows), settings.batch_size):
        rows_B = rows[start : start + settings.batch_size]
        inputs_BI = heads.inputs(examples.hidden(rows_B, device), examples.paths(rows_B, device))
        labels_BK = examples.labels(rows_B, device)
        parts.append(score(heads, inputs_BI, labels_BK, head_decay=settings.head_decay, chunk=settings.loss_chunk))
    scores = combine(parts, settings.head_decay)
    return _Evaluated(scores, chain_accuracy(scores.right_BK.cpu().numpy(), examples, rows))


class _News:
    """Makes events: knows how far the run is and how fast it goes."""

    def __init__(self, order: Order, total_steps: int, first: int, settings: TrainSettings) -> None:
        self._order = order
        self._total_steps = total_steps
        self._first = first
        self._settings = settings
        self._began = time.perf_counter()

    def evaluated(self, step: int, heads: MedusaHeads, held_out: Examples) -> Event:
        """An evaluation after `step` steps."""
        found = _evaluate(heads, held_out, self._settings)
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
            loss=None if scores is None else float(scores.loss),
            loss_K=None if scores is None else scores.loss_K.tolist(),
            top1_K=None if scores is None else scores.top1_K.tolist(),
            examples_per_second=done * self._order.batch_size / seconds,
            seconds_left=(self._total_steps - step) * seconds / max(done, 1),
        )


def _flat(event: Event) -> dict[str, float]:
    """An event's numbers by name, one level deep."""
    names = ("tokens_per_step", "speedup") if event.kind == "decode" else ("loss", "learning_rate")
    values: dict[str, float] = {f"{event.kind}/{name}": getattr(event, name) for name in names}
    for name, numbers in (("loss", event.loss_K), ("top1", event.top1_K), ("conditional", event.conditional_K)):
        values |= {f"{event.kind}/{name}_head_{head + 1}": number for head, number in enumerate(numbers or [])}
    return values
