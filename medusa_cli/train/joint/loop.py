"""Heads and an adapter of their target learning together: the second stage of Medusa-2 (arXiv 2401.10774, 2.2.2).

The first stage taught the heads alone. Here the adapted target reads each text, its hidden states are the heads'
inputs, and what both losses say of them goes back into the adapter: the heads' loss times a weight that rises from 0
(the warm-up of section 2.2.2), and what it costs to predict other tokens than the target does (train/kl_loss.py). The
heads learn at a rate of their own, from the first step on: AdamW's steps don't depend on a loss's weight.

Nothing prints. What a step does depends only on the recipe, the seed and the step's number, dropout included, so a run
that goes on from a checkpoint ends bit-equal to an unbroken one.
Shape letters: B texts, T positions, N places that ask the heads something, P places that predict a learnt token, K
heads, H hidden.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from medusa_cli.errors import TargetError, TrainingError
from medusa_cli.heads.base import Heads
from medusa_cli.model.adapter import LearningAdapter
from medusa_cli.model.target import Target
from medusa_cli.train.checkpoint import Checkpoints, TrainState
from medusa_cli.train.corpus import some_of
from medusa_cli.train.joint.events import (
    JointEvent,
    JointNews,
    JointOutlets,
    JointSeen,
    JointSettings,
    heads_weight,
    schedule,
)
from medusa_cli.train.kl_loss import Kept, keep
from medusa_cli.train.loop import make_optimizer
from medusa_cli.train.loss import combine, score, score_and_learn
from medusa_cli.train.order import Order, learning_rate
from medusa_cli.train.texts import Reading, Texts

EVAL_TEXTS = 64
"""Held-out texts an evaluation reads, at most."""


@dataclass(frozen=True)
class Learners:
    """Who learns together. The target holds plain layers, those the adapter lies over."""

    target: Target
    adapter: LearningAdapter
    heads: Heads


@dataclass(frozen=True)
class JointTexts:
    """Texts to learn from and texts kept for measuring."""

    train: Texts
    held_out: Texts


def train_joint(
    learners: Learners, texts: JointTexts, settings: JointSettings, checkpoints: Checkpoints, outlets: JointOutlets
) -> JointEvent:
    """Train heads and adapter in place, going on from the newest checkpoint if there is one; the last evaluation.

    A run that is asked to stop saves after the step it is at and ends with KeyboardInterrupt. Raises TrainingError as
    `loop.train`, and TargetError for a target whose logits are not what `logits_of` says.
    """
    lora, samples = settings.lora, texts.train.samples
    order = Order(len(samples), lora.batch_size, settings.seed)
    total_steps = order.total_steps(lora.epochs, lora.max_steps)
    heads, adapter = learners.heads, learners.adapter
    optimizer = _make_optimizer(learners, settings)
    state = TrainState(heads, optimizer, order.state(total_steps), adapter=adapter.parameters)
    # laid out from what is bound now, whoever trained the heads before; the adapter never touches the output matrix
    heads.train().pack_output()
    first = checkpoints.restore(state)
    told = outlets.log.rewind(first or -1)  # the evaluation before any step is told anew
    news = JointNews(settings, total_steps, order.batch_size, first)
    check_logits(learners.target, texts.held_out)
    if first and not told and (first == total_steps or first % settings.train.save_steps == 0):
        outlets.send(news.event("save", first, None))  # the run was killed between a save and the news of it
    evaluated = None
    if first in (0, total_steps):
        evaluated = news.event("eval", first, _evaluate(learners, texts.held_out, settings))
        if first == 0:
            outlets.send(evaluated)
    for step in range(first, total_steps):
        batch = [samples[index] for index in order.rows(step)]
        seen = _take_step(learners, state, texts.train, _Step(step, total_steps, batch), settings)
        outlets.send(news.event("train", step + 1, seen))
        last = step + 1 == total_steps
        if last or (step + 1) % settings.train.eval_steps == 0:
            evaluated = news.event("eval", step + 1, _evaluate(learners, texts.held_out, settings))
            outlets.send(evaluated)
        stopping, due = outlets.stop_asked(), last or (step + 1) % settings.train.save_steps == 0
        if due or stopping:
            checkpoints.save(step + 1, state)
        if due:  # a save at a stop is no news
            outlets.send(news.event("save", step + 1, None))
        if stopping and not last:
            raise KeyboardInterrupt
    assert evaluated is not None
    return evaluated


@torch.no_grad()
def check_logits(target: Target, texts: Texts) -> None:
    """Raise TargetError when the model reworks its logits in a way that `logits_of` doesn't know."""
    ids_1T = texts.read(texts.samples[:1]).ids_BT[:, :2]
    theirs_V = target.model(input_ids=ids_1T.to(target.device), use_cache=False).logits[0, -1].float()
    ours_V = target.logits_of(target.read(ids_1T, [2])[0, -1]).float()
    if not torch.allclose(ours_V, theirs_V, rtol=0.02, atol=0.02 * float(theirs_V.abs().max())):
        raise TargetError(
            f"{target.name} ({target.config.model_type}) makes its logits in a way that can't be learnt through",
            "leave the section lora out: heads alone can be trained",
        )


@dataclass(frozen=True)
class _Step:
    """One step's number (from 0), how many there are, and its samples."""

    number: int
    total: int
    samples: Sequence[int]


def _make_optimizer(learners: Learners, settings: JointSettings) -> torch.optim.AdamW:
    """AdamW over the heads' parameters, as when they learn alone, and the adapter's; each group knows its peak rate."""
    optimizer = make_optimizer(learners.heads, settings.train)
    for group in optimizer.param_groups:
        group["peak"] = settings.lora.heads_learning_rate
    adapter = list(learners.adapter.parameters.values())
    optimizer.add_param_group({"params": adapter, "weight_decay": 0.0, "peak": settings.lora.learning_rate})
    return optimizer


def _take_step(learners: Learners, state: TrainState, texts: Texts, step: _Step, settings: JointSettings) -> JointSeen:
    """One batch: read it twice, both losses, gradients, check, update. Nothing changes when a number is not finite."""
    state.optimizer.zero_grad(set_to_none=True)
    reading = texts.read(step.samples)
    with learners.adapter.learn(), _dropout_of(settings.seed, step.number, learners.target.device):
        own, adapted = _read(learners, reading)
        weight = heads_weight(step.number, step.total, settings.lora)
        seen, grad = _losses(learners, texts, reading, (own, adapted.detach()), settings, weight)
        _check_finite(seen, reading, texts, step, [])
        adapted.backward(grad.to(adapted.dtype))
    learnt = [*learners.heads.parameters(), *learners.adapter.parameters.values()]
    _check_finite(seen, reading, texts, step, [each.grad for each in learnt if each.grad is not None])
    factor = learning_rate(step.number, step.total, schedule(settings.lora))
    for group in state.optimizer.param_groups:
        group["lr"] = group["peak"] * factor
    state.optimizer.step()
    return seen


def _read(learners: Learners, reading: Reading) -> tuple[Tensor, Tensor]:
    """Hidden states [B * T, H] of the target as it is, and as it is adapted."""
    target = learners.target
    with torch.no_grad(), learners.adapter.off():
        own = target.read(reading.ids_BT, reading.lengths).flatten(0, 1)
    return own, target.read(reading.ids_BT, reading.lengths).flatten(0, 1)


def _losses(
    learners: Learners,
    texts: Texts,
    reading: Reading,
    hidden: tuple[Tensor, Tensor],
    settings: JointSettings,
    weight: float,
) -> tuple[JointSeen, Tensor]:
    """Both losses, the heads' gradients in place, and the gradient of the whole for the adapted states [B * T, H]."""
    own, adapted = hidden
    heads, chunk, device = learners.heads, settings.train.loss_chunk, adapted.device
    learnt_P, asked_N = reading.learnt_P.to(device), reading.asked_N.to(device)
    kept = keep(learners.target, adapted[learnt_P], own[learnt_P], chunk=chunk, learn=True)
    hidden_NH = adapted[asked_N].float().requires_grad_()
    scores = score_and_learn(
        heads,
        heads.inputs(hidden_NH, texts.examples.paths(reading.rows_N, device)),
        texts.examples.labels(reading.rows_N, device),
        head_decay=settings.train.head_decay,
        chunk=chunk,
    )
    assert kept.grad_PH is not None
    assert hidden_NH.grad is not None
    grad = torch.zeros(adapted.shape, device=device)
    grad.index_add_(0, learnt_P, kept.grad_PH, alpha=settings.lora.keep_weight)
    grad.index_add_(0, asked_N, hidden_NH.grad, alpha=weight)
    return JointSeen(scores, kept), grad


@torch.no_grad()
def _evaluate(learners: Learners, texts: Texts, settings: JointSettings) -> JointSeen:
    """Scores on evenly spread held-out texts, the same ones each time."""
    samples = texts.samples
    chosen = [samples[i] for i in np.unique(np.linspace(0, len(samples) - 1, EVAL_TEXTS).astype(np.int64))]
    heads, chunk, decay = learners.heads, settings.train.loss_chunk, settings.train.head_decay
    parts, kept = [], []
    for start in range(0, len(chosen), settings.lora.batch_size):
        reading = texts.read(chosen[start : start + settings.lora.batch_size])
        own, adapted = _read(learners, reading)
        learnt_P, asked_N = reading.learnt_P.to(own.device), reading.asked_N.to(own.device)
        kept.append(keep(learners.target, adapted[learnt_P], own[learnt_P], chunk=chunk, learn=False))
        inputs_NI = heads.inputs(adapted[asked_N].float(), texts.examples.paths(reading.rows_N, own.device))
        labels_NK = texts.examples.labels(reading.rows_N, own.device)
        parts.append(score(heads, inputs_NI, labels_NK, head_decay=decay, chunk=chunk))
    divergence_P, same_P = (torch.cat([getattr(one, name) for one in kept]) for name in ("divergence_P", "same_P"))
    return JointSeen(combine(parts, decay), Kept(divergence_P, same_P, None))


def _check_finite(seen: JointSeen, reading: Reading, texts: Texts, step: _Step, gradients: Sequence[Tensor]) -> None:
    """Raise TrainingError naming the texts whose losses are not finite, or all of the batch when a gradient isn't."""
    bad_N = ~seen.scores.pair_loss_BK.isfinite().all(1).cpu()
    bad_P = ~seen.kept.divergence_P.isfinite().cpu()
    if not (bad_N.any() or bad_P.any()) and all(bool(gradient.isfinite().all()) for gradient in gradients):
        return
    bad = sorted({*reading.text_N[bad_N].tolist(), *reading.text_P[bad_P].tolist()}) or range(len(step.samples))
    names = texts.names([step.samples[text] for text in bad])
    raise TrainingError(
        f"step {step.number + 1} of heads and adapter: the loss is not finite on {some_of(names)}",
        "look at these samples, or lower lora.learning_rate; the last checkpoint is whole (--resume-from-checkpoint)",
    )


@contextmanager
def _dropout_of(seed: int, step: int, device: torch.device) -> Iterator[None]:
    """Random numbers that the seed and the step alone decide; those outside go on as if none had been drawn."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int(np.random.default_rng([abs(seed), step]).integers(2**63)))
        yield
