"""Comparing texts: are two replies the same? Where not: at which token, and was it a near tie there?

In floating point a forward over a tree and a forward over one token round differently. When the best two logits
are closer than that rounding, either token is the model's own choice: a near tie. Any wider gap is a mismatch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from medusa_cli.decode.loop import Generation, Parts, collect
from medusa_cli.decode.rows import Limits, Row
from medusa_cli.drafters.none import NoDrafter

# In integers a row's numbers are the same in any company: there is no rounding to blame.
# How many roundings of the largest logit two forwards of the same model may lie apart. Measured on
# SmolLM2-135M (30 layers), one token at a time against one forward of 64 tokens, differences within the best 8
# logits: at most 15.7 in float32 and 2.4 in bfloat16, where kernels sum in float32. float16 is set between.
_ROUNDINGS: Mapping[str, float] = {"float32": 24.0, "float16": 6.0, "bfloat16": 3.0, "int8": 0.0}


@dataclass(frozen=True)
class Difference:
    """The first token at which two replies to one prompt differ.

    margin   how far the less likely of the two tokens lies under the best logit: the gap of the best two when
             these two are the tokens. None when one reply ends where the other goes on.
    """

    index: int
    margin: float | None
    verdict: Literal["near-tie", "mismatch"]


def near_tie_bound(dtype: str, scale: float) -> float:
    """The widest gap that rounding alone may turn over: a number of roundings (eps) of the largest logit.

    dtype   float32, float16, bfloat16, or int8, whose texts differ nowhere
    scale   the largest absolute logit at the position
    About 1e-4 in float32 and 0.9 in bfloat16 where the logits reach 38.
    """
    if _ROUNDINGS[dtype] == 0:
        return 0.0
    return _ROUNDINGS[dtype] * torch.finfo(getattr(torch, dtype)).eps * scale


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first index at which two replies differ, the shorter one's length when it is a prefix, or None."""
    for index, (our, their) in enumerate(zip(ours, theirs, strict=False)):
        if our != their:
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


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


def from_plain(
    parts: Parts, prompts: Sequence[list[int]], written: Sequence[Generation], limits: Limits, max_rows: int
) -> list[Difference | None]:
    """Where each text differs from what plain decoding writes, which this does; None where it doesn't."""
    plain = collect(replace(parts, drafter=NoDrafter()), prompts, limits, max_rows)
    return [
        difference(mine.token_ids, alone.token_ids, parts.target.dtype_name, _deciding(parts, prompt, limits))
        for prompt, mine, alone in zip(prompts, written, plain, strict=True)
    ]


def _deciding(parts: Parts, prompt: list[int], limits: Limits) -> Callable[[list[int]], Tensor]:
    """New ids after this prompt to the logits [V] that decide the next: by one plain forward, and reworked."""

    @torch.inference_mode()
    def logits_after(new_ids: list[int]) -> Tensor:
        row = Row(0, [*prompt, *new_ids], len(prompt), limits)
        first = parts.target.tables.first_length(row.prompt_tokens, len(row.tokens))
        cache = parts.target.new_cache(1, len(row.tokens))
        logits_BV = parts.target.prefill([row.tokens], cache, as_long_as=[first]).logits_BNV[:, 0]
        return logits_BV[0] if parts.shaping is None else parts.shaping.first(logits_BV, [row])[0]

    return logits_after
