"""Are the replies of two arms the same? Where not: at which token, and was it a near tie there?

In floating point a forward over a tree and a forward over one token round differently. When the best two logits
are closer than that rounding, either token is the model's own choice: a near tie. Any wider gap is a mismatch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from medusa_cli.bench.run import Trial

LLAMA_CPP = "llama-cpp"
AS_STORED = "as stored"
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
class Difference:
    """The first token at which two replies to one prompt differ.

    margin   how far the less likely of the two tokens lies under the best logit: the gap of the best two when
             these two are the tokens. None when one reply ends where the other goes on.
    """

    index: int
    margin: float | None
    verdict: Literal["near-tie", "mismatch"]


@dataclass(frozen=True)
class Divergence:
    """A difference between the subject's reply to the prompt `id` and that of another arm."""

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
    """`bfloat16` for `hf-greedy@bfloat16`; `default`, the subject's, for a name without one.

    llama.cpp takes the weights as its file stores them, in integers where that is quantised: none of torch's dtypes.
    """
    return AS_STORED if arm == LLAMA_CPP else arm.partition("@")[2] or default


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first index at which two replies differ, the shorter one's length when it is a prefix, or None."""
    for index, (our, their) in enumerate(zip(ours, theirs, strict=False)):
        if our != their:
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def compare(
    trials: Sequence[Trial], subject: str, dtype: str, logits_after: Callable[[Sequence[int], list[int]], Tensor]
) -> Comparison:
    """The first repeat's replies of every arm against those of `subject`.

    dtype          the subject's; a pair of arms is judged by the coarser dtype of the two, and one with llama.cpp,
                   whose rounding no bound is known for, by this one
    logits_after   a prompt and the ids written after it to the target's logits [V] for the token after them
    """
    first = [trial for trial in trials if trial.repeat == 0]
    ours = {trial.prompt.id: trial for trial in first if trial.arm == subject}
    same: dict[str, list[bool]] = {}
    divergences = []
    for trial in first:
        if trial.arm == subject:
            continue
        mine = ours[trial.prompt.id].reply.token_ids
        judged_by = _coarser(dtype, dtype_of(trial.arm, dtype))
        found = difference(mine, trial.reply.token_ids, judged_by, partial(logits_after, trial.prompt.ids))
        same.setdefault(trial.arm, []).append(found is None)
        if found is not None:
            divergences.append(Divergence(trial.prompt.id, trial.arm, found.index, found.margin, found.verdict))
    return Comparison({arm: Same(sum(equal), len(equal)) for arm, equal in same.items()}, divergences)


def _coarser(ours: str, theirs: str) -> str:
    """The dtype that rounds more; ours beside llama.cpp's arithmetic."""
    if theirs == AS_STORED:
        return ours
    return max(ours, theirs, key=lambda name: torch.finfo(getattr(torch, name)).eps)


def difference(
    ours: Sequence[int], theirs: Sequence[int], dtype: str, logits_after: Callable[[list[int]], Tensor]
) -> Difference | None:
    """Where two replies part and how near a tie it was there; None when they are the same.

    logits_after   ids that both replies begin with to the logits [V] that decide the token after them
    """
    index = first_difference(ours, theirs)
    if index is None:
        return None
    if index == min(len(ours), len(theirs)):
        return Difference(index, None, "mismatch")
    logits_V = logits_after(list(ours[:index])).float()
    chosen = logits_V[[ours[index], theirs[index]]]
    margin = float(logits_V.max() - chosen.min())
    # a token that may not come at all has no logit that rounding could move
    scale = float(logits_V[logits_V.isfinite()].abs().max())
    return Difference(index, margin, "near-tie" if margin <= near_tie_bound(dtype, scale) else "mismatch")
