"""What heads' guesses cost over supervised places, projected to the draft vocabulary in pieces.

Cross-entropy, or a mixture of it with the distance from the target's own chances over the draft vocabulary, which its
output matrix gives without scale or cap.

Only (place, head) pairs that ask for a token of the draft vocabulary are projected, `chunk` of them at once, and each
piece's gradient is taken before the next is projected: the largest tensor is [chunk, W] whatever the number of heads
and places. The gradient is written out by hand, so that a shared output matrix, which is not trained, costs none.

Shape letters: B places, K heads, H hidden, I inputs of the heads, W draft vocabulary, C pairs projected at once, P all
pairs asked.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medusa_cli.config.recipe import LossSettings
from medusa_cli.heads.base import Heads, Projection


@dataclass(frozen=True)
class Scores:
    """What a batch cost and how often the best guess was right, per head, over the pairs asked.

    loss is what is minimised: the sum over heads of head_decay ** k times that head's mean loss. A head with nothing
    to learn from counts 0. pair_loss_BK is 0 where nothing is asked, and right_BK False.
    """

    loss: Tensor
    loss_K: Tensor
    right_K: Tensor
    count_K: Tensor
    pair_loss_BK: Tensor
    right_BK: Tensor

    @property
    def mean_loss(self) -> float | None:
        """The loss; None where no head was asked anything: nothing to learn is no loss of 0."""
        return float(self.loss) if bool(self.count_K.any()) else None

    @property
    def mean_loss_K(self) -> list[float | None]:
        """The loss of each head; None for one that was asked nothing."""
        each = zip(self.loss_K.tolist(), self.count_K.tolist(), strict=True)
        return [loss if count else None for loss, count in each]

    @property
    def top1_K(self) -> Tensor:
        """Per head, the share of the pairs asked whose best guess was right; 0 where nothing was asked."""
        return self.right_K / self.count_K.clamp(min=1)


@dataclass(frozen=True)
class Teacher:
    """The target's hidden states that decided each label [B, K, H], and how much the distance from it counts."""

    hidden_BKH: Tensor
    losses: LossSettings


def combine(parts: Sequence[Scores], head_decay: float) -> Scores:
    """The scores of several batches as of one."""
    pair_loss_BK = torch.cat([part.pair_loss_BK for part in parts])
    count_K = torch.stack([part.count_K for part in parts]).sum(0)
    right_BK = torch.cat([part.right_BK for part in parts])
    return _sum_up(pair_loss_BK, right_BK, count_K, head_decay)


@dataclass(frozen=True)
class _Piece:
    """C pairs of one head or, with a shared output, of any: rows of blocks_PH, their labels and output layer."""

    rows_C: Tensor
    labels_C: Tensor
    head: int
    projection: Projection


@dataclass(frozen=True)
class _Gradient:
    """The loss's gradient for the blocks, to be filled, and how much each pair's own loss counts in it."""

    blocks_PH: Tensor
    weight_P: Tensor


@dataclass(frozen=True)
class _Asked:
    """What a batch is asked, how much each head counts, how many pairs are projected at once, and the teacher."""

    labels_BK: Tensor
    head_decay: float
    chunk: int
    teacher: Teacher | None


def score(
    heads: Heads, inputs_BI: Any, labels_BK: Tensor, *, head_decay: float, chunk: int, teacher: Teacher | None = None
) -> Scores:
    """The loss of a batch, without gradients."""
    with torch.no_grad():
        asked = _Asked(labels_BK, head_decay, chunk, teacher)
        return _score(heads, heads.block_forward(inputs_BI), asked)


def score_and_learn(
    heads: Heads,
    inputs_BI: Any,
    labels_BK: Tensor,
    *,
    head_decay: float,
    chunk: int,
    whole_K: Tensor | None = None,
    teacher: Teacher | None = None,
) -> Scores:
    """The loss of a batch; its gradient is added to the `grad` of the heads' trained parameters.

    whole_K  pairs that each head is asked in the whole step, when the batch is a part of one: the gradients of all
             parts add up to the whole's. None: the batch is the whole
    teacher  the target's own chances, where these are learnt from; None: the labels alone
    """
    blocks_BKH = heads.block_forward(inputs_BI)
    asked_K = _count(labels_BK) if whole_K is None else whole_K
    weight_K = _decay(len(asked_K), head_decay, blocks_BKH) / asked_K.clamp(min=1)
    gradient = _Gradient(torch.zeros_like(blocks_BKH).flatten(0, 1), weight_K.expand_as(labels_BK).reshape(-1))
    with torch.no_grad():
        scores = _score(heads, blocks_BKH.detach(), _Asked(labels_BK, head_decay, chunk, teacher), gradient)
    blocks_BKH.backward(gradient.blocks_PH.view_as(blocks_BKH))
    return scores


def _score(heads: Heads, blocks_BKH: Tensor, asked: _Asked, gradient: _Gradient | None = None) -> Scores:
    """The scores of a batch; fills the gradient, and those of what the output has of its own, when given."""
    labels_BK = asked.labels_BK
    pair_loss_BK = torch.zeros_like(labels_BK, dtype=blocks_BKH.dtype)
    right_BK = torch.zeros_like(labels_BK, dtype=torch.bool)
    blocks_PH = blocks_BKH.flatten(0, 1)
    for piece in _pieces(heads, labels_BK, asked.chunk):
        inputs_CH, projection = blocks_PH[piece.rows_C], piece.projection
        logits_CW = projection.logits(inputs_CH)
        wanted_C = logits_CW.gather(1, piece.labels_C[:, None]).squeeze(1)
        best_C = logits_CW.amax(1)
        softmax_CW = logits_CW.softmax(1)
        # log-sum-exp from the two maxima, which is exact where softmax of the wanted token underflows to 0
        loss_C = best_C - softmax_CW.amax(1).log() - wanted_C
        right_BK.view(-1)[piece.rows_C] = wanted_C >= best_C
        if asked.teacher is None:
            grad_CW = _minus_one_hot(softmax_CW, piece.labels_C) if gradient is not None else softmax_CW
        else:
            judged = _beside(asked.teacher, piece, softmax_CW, logits_CW, loss_C, want_gradient=gradient is not None)
            loss_C, grad_CW = judged.loss_C, judged.grad_CW
            if gradient is not None:
                _learn_confidence(heads, inputs_CH, judged.shared_C, gradient.weight_P[piece.rows_C])
        pair_loss_BK.view(-1)[piece.rows_C] = loss_C
        if gradient is not None:
            weight_C = gradient.weight_P[piece.rows_C]
            gradient.blocks_PH[piece.rows_C] = projection.back(grad_CW) * weight_C[:, None]
            if heads.output_weight is not None:
                _learn_output(heads, piece.head, grad_CW, inputs_CH * weight_C[:, None], weight_C)
            if projection.pairs_WR is not None:
                _add_to(
                    projection.pairs_WR, grad_CW.T, inputs_CH[:, -projection.pairs_WR.shape[1] :] * weight_C[:, None]
                )
    return _sum_up(pair_loss_BK, right_BK, _count(labels_BK), asked.head_decay)


@dataclass(frozen=True)
class _Judged:
    """What a piece costs beside a teacher, the gradient for its logits, and how much mass both have in common."""

    loss_C: Tensor
    grad_CW: Tensor
    shared_C: Tensor


def _beside(
    teacher: Teacher, piece: _Piece, softmax_CW: Tensor, logits_CW: Tensor, entropy_C: Tensor, *, want_gradient: bool
) -> _Judged:
    """A piece held against the target's own chances; `entropy_C` is what it costs by the labels alone."""
    losses = teacher.losses
    size = piece.projection.weight_WH.shape[1]
    theirs_CW = piece.projection.own_logits(teacher.hidden_BKH.flatten(0, 1)[piece.rows_C, :size])
    log_theirs_CW = theirs_CW.log_softmax(1) if losses.kl else None
    theirs_CW = theirs_CW.softmax(1)
    apart_CW = softmax_CW - theirs_CW
    distance_C = apart_CW.abs().sum(1)
    loss_C = losses.ce * entropy_C + losses.l1 * distance_C
    if log_theirs_CW is not None:
        loss_C = loss_C + losses.kl * (theirs_CW * (log_theirs_CW - logits_CW.log_softmax(1))).sum(1)
    if not want_gradient:
        return _Judged(loss_C, softmax_CW, 1 - distance_C / 2)
    # of the distance: by a chance its sign, and by the logits what softmax makes of that
    signs_CW = apart_CW.sign()
    grad_CW = losses.l1 * softmax_CW * (signs_CW - (softmax_CW * signs_CW).sum(1, keepdim=True))
    if losses.kl:
        grad_CW += losses.kl * apart_CW
    if losses.ce:
        grad_CW += losses.ce * _minus_one_hot(softmax_CW, piece.labels_C)
    return _Judged(loss_C, grad_CW, 1 - distance_C / 2)


def _learn_confidence(heads: Heads, inputs_CH: Tensor, shared_C: Tensor, weight_C: Tensor) -> None:
    """Add the gradient of what judges a place, for heads that have it: log-odds of the mass in common."""
    if heads.confidence_weight is None or heads.confidence_bias is None:
        return
    said_C = (inputs_CH @ heads.confidence_weight + heads.confidence_bias).sigmoid()
    grad_C = (said_C - shared_C) * weight_C
    for parameter, grad in ((heads.confidence_weight, grad_C @ inputs_CH), (heads.confidence_bias, grad_C.sum()[None])):
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad


def _count(labels_BK: Tensor) -> Tensor:
    """Pairs that each head is asked [K]."""
    return (labels_BK >= 0).sum(0)


def _sum_up(pair_loss_BK: Tensor, right_BK: Tensor, count_K: Tensor, head_decay: float) -> Scores:
    """Per-head means and their weighted sum."""
    loss_K = pair_loss_BK.sum(0) / count_K.clamp(min=1)
    loss = (loss_K * _decay(len(loss_K), head_decay, loss_K)).sum()
    return Scores(loss, loss_K, right_BK.sum(0), count_K, pair_loss_BK, right_BK)


def _decay(num_heads: int, head_decay: float, like: Tensor) -> Tensor:
    """head_decay ** k for every head."""
    return head_decay ** torch.arange(num_heads, dtype=like.dtype, device=like.device)


def _pieces(heads: Heads, labels_BK: Tensor, chunk: int) -> Iterator[_Piece]:
    """All pairs asked, at most `chunk` at once; pairs of different heads share a piece when they share the output."""
    labels_P = labels_BK.reshape(-1)
    asked_P = labels_P >= 0
    if heads.output_weight is None:
        groups = [(0, asked_P.nonzero().squeeze(1))]
    else:
        num_heads = labels_BK.shape[1]
        head_P = torch.arange(num_heads, device=labels_P.device).expand_as(labels_BK).reshape(-1)
        groups = [(head, (asked_P & (head_P == head)).nonzero().squeeze(1)) for head in range(num_heads)]
    for head, rows in groups:
        for rows_C in rows.split(chunk):
            if len(rows_C):
                yield _Piece(rows_C, labels_P[rows_C], head, heads.projection(head))


def _minus_one_hot(softmax_CW: Tensor, labels_C: Tensor) -> Tensor:
    """softmax - one-hot, in place: the gradient of cross-entropy with respect to the logits."""
    softmax_CW[torch.arange(len(labels_C), device=labels_C.device), labels_C] -= 1
    return softmax_CW


def _learn_output(heads: Heads, head: int, grad_CW: Tensor, weighted_CH: Tensor, weight_C: Tensor) -> None:
    """Add a piece's gradient to one head's own output layer; weighted_CH are its inputs times weight_C."""
    assert heads.output_weight is not None
    if heads.output_weight.grad is None:
        heads.output_weight.grad = torch.zeros_like(heads.output_weight)
    heads.output_weight.grad[head].addmm_(grad_CW.T, weighted_CH)
    if heads.output_bias is not None:
        if heads.output_bias.grad is None:
            heads.output_bias.grad = torch.zeros_like(heads.output_bias)
        heads.output_bias.grad[head] += weight_C @ grad_CW


def _add_to(parameter: Tensor, one: Tensor, other: Tensor) -> None:
    """Add a product to a parameter's gradient."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    parameter.grad.addmm_(one, other)
