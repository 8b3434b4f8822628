"""Are the replies of two arms the same? Where not: at which token, and was it a near tie there?

In floating point a forward over a tree and a forward over one token round differently. When the best two logits
are closer than that rounding, either token is the model's own choice: a near tie. Any wider gap is a mismatch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from medusa_cli.bench.run import Trial

# How many roundings of the largest logit two forwards of the same model may lie apart. Measured on
# SmolLM2-135M (30 layers), one token at a time against one forward of 64 tokens, differences within the best 8
# logits: at most 15.7 in float32 and 2.4 in bfloat16, where kernels sum in float32. float16 is set between.
_ROUNDINGS: Mapping[str, float] = {"float32": 24.0, "float16": 6.0, "bfloat16": 3.0}


@dataclass(frozen=True)
class Same:
    """`same` of `of` replies hold the same ids."""

    same: int
    of: int


@dataclass(frozen=True)
class Divergence:
    """The first token at which an arm's reply to a prompt differs from the subject's.

    margin   how far the less likely of the two tokens lies under the best logit: the gap of the best two when
             these two are the tokens. None when one reply ends where the other goes on.
    """

    id: str
    arm: str
    index: int
    margin: float | None
    verdict: Literal["near-tie", "mismatch"]


@dataclass(frozen=True)
class Comparison:
    """Every arm against the subject."""

    identical: Mapping[str, Same]
    divergences: Sequence[Divergence]


def near_tie_bound(dtype: str, scale: float) -> float:
    """The widest gap that rounding alone may turn over: a number of roundings (eps) of the largest logit.

    dtype   float32, float16 or bfloat16
    scale   the largest absolute logit at the position
    About 1e-4 in float32 and 0.9 in bfloat16 where the logits reach 38.
    """
    return _ROUNDINGS[dtype] * torch.finfo(getattr(torch, dtype)).eps * scale


def dtype_of(arm: str, default: str) -> str:
    """`bfloat16` for `hf-greedy@bfloat16`; `default`, the subject's, for a name without one."""
    return arm.partition("@")[2] or default


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first index at which two replies differ, the shorter one's length when it is a prefix, or None."""
    for index, (our, their) in enumerate(zip(ours, theirs, strict=False)):
        if our != their:
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def compare(
    trials: Sequence[Trial], subject: str, dtype: str, logits_after: Callable[[list[int]], Tensor]
) -> Comparison:
    """The first repeat's replies of every arm against those of `subject`.

    dtype          the subject's; a pair of arms is judged by the coarser dtype of the two
    logits_after   ids [T] to the target's logits [V] for the token after them, one plain forward
    """
    first = [trial for trial in trials if trial.repeat == 0]
    ours = {trial.prompt.id: trial for trial in first if trial.arm == subject}
    same: dict[str, list[bool]] = {}
    divergences = []
    for trial in first:
        if trial.arm == subject:
            continue
        mine = ours[trial.prompt.id]
        index = first_difference(mine.reply.token_ids, trial.reply.token_ids)
        same.setdefault(trial.arm, []).append(index is None)
        if index is not None:
            coarser = max(dtype, dtype_of(trial.arm, dtype), key=lambda name: torch.finfo(getattr(torch, name)).eps)
            divergences.append(_divergence(mine, trial, index, coarser, logits_after))
    return Comparison({arm: Same(sum(equal), len(equal)) for arm, equal in same.items()}, divergences)


def _divergence(
    ours: Trial, theirs: Trial, index: int, dtype: str, logits_after: Callable[[list[int]], Tensor]
) -> Divergence:
    """The verdict on one pair of replies that differ at `index`."""
    our_ids, their_ids = ours.reply.token_ids, theirs.reply.token_ids
    if index == min(len(our_ids), len(their_ids)):
        return Divergence(ours.prompt.id, theirs.arm, index, None, "mismatch")
    logits_V = logits_after([*ours.prompt.ids, *our_ids[:index]]).float()
    chosen = logits_V[[our_ids[index], their_ids[index]]]
    margin = float(logits_V.max() - chosen.min())
    near = margin <= near_tie_bound(dtype, float(logits_V.abs().max()))
    return Divergence(ours.prompt.id, theirs.arm, index, margin, "near-tie" if near else "mismatch")
