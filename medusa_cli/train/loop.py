"""Training the heads on stored hidden states: the target itself is not here and is never touched.

Nothing prints: what happens is given to `on_event`, and written to train.jsonl. What a step does depends only on the
recipe, the seed and the step's number, so a run that goes on from a checkpoint ends bit-equal to an unbroken one.

Shape letters: N examples, B examples of a step, K heads.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from medusa_cli.config.recipe import TrainSettings
from medusa_cli.errors import TrainingError
from medusa_cli.heads.base import Heads
from medusa_cli.train.checkpoint import Checkpoints, TrainState
from medusa_cli.train.corpus import Examples, some_of
from medusa_cli.train.early_stopping import Best, Decode, Decoding
from medusa_cli.train.events import Evaluated, Event, News, Outlets
from medusa_cli.train.loss import Scores, Teacher, combine, score, score_and_learn
from medusa_cli.train.measure import chain_accuracy
from medusa_cli.train.order import learning_rate
from medusa_cli.train.parallel import ALONE, Group, Processes

EVAL_EXAMPLES = 8192
"""Held-out examples an evaluation looks at, at most: enough for a curve; measure.py looks at all of them."""


def make_optimizer(heads: Heads, settings: TrainSettings) -> torch.optim.AdamW:
    """AdamW over the heads' parameters; only matrices decay."""
    learnt = [(name, parameter) for name, parameter in heads.named_parameters() if parameter.requires_grad]
    # a saved optimizer's states go by number: the output's come last
    named = sorted(learnt, key=lambda each: each[0].startswith("output_"))
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
    heads: Heads, sets: Sets, settings: TrainSettings, seed: int, checkpoints: Checkpoints, outlets: Outlets
) -> Event:
    """Train `heads` in place, going on from the run folder's newest checkpoint if it has one; the last evaluation.

    With patience, training may stop before its last step, and `heads` end as those that decoded best.
    Raises TrainingError when a number is not finite (naming the samples; the checkpoints and the log before it stay
    as they were), when the folder is another run's, or when it can't be written.
    """
    order = sets.train.order(settings.batch_size, seed, settings.place_share)
    total_steps = order.total_steps(settings.epochs, settings.max_steps)
    best = Best(settings.patience) if settings.patience else None
    state = TrainState(heads, make_optimizer(heads, settings), order.state(total_steps), best)
    heads.train().pack_output()
    first = checkpoints.restore(state)
    told = outlets.log.rewind(first)
    news = News(order, total_steps, first, settings)
    decoding = Decoding(sets.decode, settings, best, total_steps)
    over = first == total_steps or decoding.given_up
    if first and not told and (over or first % settings.save_steps == 0):
        outlets.send(news.event("save", first, None))  # the run was killed between a save and the news of it
    evaluated = news.evaluated(first, _evaluate(heads, sets.held_out, settings)) if over else None
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
            evaluated = news.evaluated(step + 1, _evaluate(heads, sets.held_out, settings))
            outlets.send(evaluated)
        stopping, due = outlets.stop_asked(), last or (step + 1) % settings.save_steps == 0
        if due or stopping:
            checkpoints.save(step + 1, state)
        if due:  # a save at a stop is no news: a run that was stopped tells what an unbroken one does
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
    heads: Heads,
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
    order = examples.order(settings.batch_size, seed, settings.place_share)
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
    """One batch: loss, gradient, check, update. The weights don't change when a number is not finite."""
    state.optimizer.zero_grad(set_to_none=True)
    scores = take_gradients(state.heads, examples, batch, settings, group)
    for parameters in state.optimizer.param_groups:
        parameters["lr"] = batch.learning_rate
    state.optimizer.step()
    return scores


def take_gradients(
    heads: Heads, examples: Examples, batch: Batch, settings: TrainSettings, group: Group = ALONE
) -> Scores:
    """Loss and gradient of one batch, checked.

    This process's share is taken in pieces, and every gradient weighted by what the whole batch asks.
    """
    device = heads.device
    whole_K = examples.counts(batch.rows_B).to(device)
    parts = [
        score_and_learn(
            heads,
            examples.inputs(heads, rows_B, device, heads.dtype),
            examples.labels(rows_B, device),
            head_decay=settings.head_decay,
            chunk=settings.loss_chunk,
            whole_K=whole_K,
            teacher=_teacher(heads, examples, rows_B, settings),
        )
        for rows_B in _pieces(batch.rows_B[group.share(len(batch.rows_B))], settings.micro_batch_size)
    ]
    scores = group.whole(combine(parts, settings.head_decay), len(batch.rows_B), settings.head_decay)
    group.sum_gradients(heads.parameters())
    _check_finite(scores, heads, examples, batch)
    if settings.clip is not None:
        nn.utils.clip_grad_norm_(heads.parameters(), settings.clip)
    return scores


def _teacher(heads: Heads, examples: Examples, rows_B: NDArray[np.int64], settings: TrainSettings) -> Teacher | None:
    """The target's own chances at these examples, where heads learn from them or judge themselves by them."""
    if not settings.losses.teacher and heads.confidence_weight is None:
        return None
    return Teacher(examples.decided(rows_B, heads.device), settings.losses)


def _pieces(rows_B: NDArray[np.int64], size: int | None) -> list[NDArray[np.int64]]:
    """The rows in runs of `size` at most, or as they are; at least one run, which may be empty."""
    size = size or max(len(rows_B), 1)
    return [rows_B[start : start + size] for start in range(0, max(len(rows_B), 1), size)]


def _check_finite(scores: Scores, heads: Heads, examples: Examples, batch: Batch) -> None:
    """Raise TrainingError naming the samples of the batch whose loss or gradient is not finite."""
    gradients = [parameter.grad for parameter in heads.parameters() if parameter.grad is not None]
    if bool(torch.stack([scores.loss.isfinite(), *(grad.isfinite().all() for grad in gradients)]).all()):
        return
    bad_B = ~scores.pair_loss_BK.isfinite().all(1).cpu().numpy()
    names = examples.names(batch.rows_B[bad_B] if bad_B.any() else batch.rows_B)
    raise TrainingError(
        f"step {batch.step}: the loss is not finite on {some_of(names)}",
        "look at these samples, or lower --learning-rate; the last checkpoint is whole (--resume-from-checkpoint)",
    )


def _evaluate(heads: Heads, examples: Examples, settings: TrainSettings) -> Evaluated:
    """Of evenly spread held-out examples, the same ones each time."""
    rows = np.linspace(0, len(examples) - 1, min(len(examples), EVAL_EXAMPLES)).astype(np.int64)
    device = heads.device
    parts = []
    for start in range(0, len(rows), settings.batch_size):
        rows_B = rows[start : start + settings.batch_size]
        inputs = examples.inputs(heads, rows_B, device, heads.dtype)
        labels_BK, teacher = examples.labels(rows_B, device), _teacher(heads, examples, rows_B, settings)
        parts.append(
            score(heads, inputs, labels_BK, head_decay=settings.head_decay, chunk=settings.loss_chunk, teacher=teacher)
        )
    scores = combine(parts, settings.head_decay)
    return Evaluated(scores, chain_accuracy(scores.right_BK.cpu().numpy(), examples, rows))
