"""What trees that follow the heads' own confidence would gain: their beliefs at held-out places, replayed.

Shape letters: N places, B places at once, K heads, R ranks, W draft vocabulary, M tree nodes.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medusa_cli.heads.medusa import MedusaHeads
from medusa_cli.train.corpus import NOT_ASKED, Examples
from medusa_cli.train.measure import Ranks
from medusa_cli.trees.dynamic import DynamicShape, dynamic_tree

_BATCH = 256


@dataclass(frozen=True)
class Beliefs:
    """logp_NKR: each head's R best tokens' log-chances; ranks_NK: where the true token is among them, R for a miss."""

    logp_NKR: Tensor
    ranks_NK: Tensor


@dataclass(frozen=True)
class Replay:
    """Tokens a step of a shape, the bonus token included, and how often each number of nodes, root included, came."""

    tokens: float
    sizes: Counter[int]


def beliefs_at(heads: MedusaHeads, examples: Examples, measured: Ranks, *, num_ranks: int, most: int) -> Beliefs:
    """The heads' beliefs at up to `most` of the measured places where every head is asked, spread evenly."""
    asked = np.flatnonzero((measured.ranks_NK != NOT_ASKED).all(axis=1))
    chosen = asked[np.linspace(0, len(asked) - 1, min(most, len(asked))).astype(np.int64)]
    rows_N = np.searchsorted(examples.places_N, measured.places_N[chosen])
    starts = range(0, len(rows_N), _BATCH)
    parts = [_logp(heads, examples, rows_N[start : start + _BATCH], num_ranks) for start in starts]
    ranks_NK = torch.from_numpy(measured.ranks_NK[chosen].astype(np.int64)).clamp(max=num_ranks)
    return Beliefs(torch.cat(parts), ranks_NK)


@torch.no_grad()
def _logp(heads: MedusaHeads, examples: Examples, rows_B: NDArray[np.int64], num_ranks: int) -> Tensor:
    """Log-chances [B, K, R] of the best guesses, on the host."""
    device = heads.weight.device
    hidden_BH = examples.hidden(rows_B, device).to(heads.weight.dtype)
    logits_BKW = heads(heads.inputs(hidden_BH, examples.paths(rows_B, device)))
    return logits_BKW.float().log_softmax(-1).topk(num_ranks, dim=-1).values.cpu()


def replay(beliefs: Beliefs, shape: DynamicShape) -> Replay:
    """What trees of this shape would have kept, one place at a time."""
    kept, sizes = 0, Counter[int]()
    for logp_BKR, ranks_BK in _batches(beliefs):
        tree = dynamic_tree(logp_BKR, shape.size, shape.floor)
        true_BM = ranks_BK.gather(1, (tree.depths_XN - 1).clamp(min=0))
        right_BM = (true_BM == tree.ranks_XN) & tree.real_XN
        right_BM[:, 0] = True
        alive_BM = (right_BM[:, None] | ~tree.ancestors_XNN).all(-1)
        kept += int((alive_BM * tree.depths_XN).amax(1).sum())
        sizes.update(tree.real_XN.sum(1).tolist())
    return Replay(1 + kept / len(beliefs.ranks_NK), sizes)


def _batches(beliefs: Beliefs) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(beliefs.logp_NKR.split(_BATCH), beliefs.ranks_NK.split(_BATCH), strict=True)
