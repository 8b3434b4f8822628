"""Are the replies of two arms the same? Each difference is a near tie or a mismatch, as decode/exactness.py tells."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from medusa_cli.bench.run import Trial
from medusa_cli.decode.exactness import difference
from medusa_cli.model.device import IN_INTEGERS

LLAMA_CPP = "llama-cpp"
AS_STORED = "as stored"


@dataclass(frozen=True)
class Same:
    """`same` of `of` replies hold the same ids."""

    same: int
    of: int


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


def dtype_of(arm: str, default: str) -> str:
    """`bfloat16` for `hf-greedy@bfloat16`; `default`, the subject's, for a name without one.

    llama.cpp takes the weights as its file stores them, in integers where that is quantised: none of torch's dtypes.
    """
    return AS_STORED if arm == LLAMA_CPP else arm.partition("@")[2] or default


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
    if IN_INTEGERS in (ours, theirs):
        return IN_INTEGERS
    return max(ours, theirs, key=lambda name: torch.finfo(getattr(torch, name)).eps)
