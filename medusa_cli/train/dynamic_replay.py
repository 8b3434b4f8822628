"""What trees that follow the heads' own confidence would gain: their beliefs at held-out places, replayed.

Shape letters: N places, B places at once, K heads, R ranks, W draft vocabulary, C candidates with the root, M nodes.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medusa_cli.drafters.beam import Candidates
from medusa_cli.drafters.block_paths import Pairs, places_of
from medusa_cli.drafters.hydra import guesses, likeliest_of
from medusa_cli.drafters.trie import ROOT, Trie
from medusa_cli.heads.base import Heads
from medusa_cli.heads.block import BlockHeads
from medusa_cli.train.corpus import NOT_ASKED, Examples
from medusa_cli.train.measure import Ranks
from medusa_cli.trees.dynamic import DynamicShape, dynamic_tree

_BATCH = 256
_MOST_NODES = 64  # of a tree that is replayed


@dataclass(frozen=True)
class Replay:
    """Tokens a step of a shape, the bonus token included, and how often each number of nodes, root included, came."""

    tokens: float
    sizes: Counter[int]


class Beliefs(Protocol):
    """What heads thought at held-out places, and what was right."""

    def replay(self, shape: DynamicShape) -> Replay:
        """What trees of this shape would have kept, one place at a time."""


def beliefs_at(heads: Heads, examples: Examples, measured: Ranks, *, num_ranks: int, most: int) -> Beliefs:
    """The heads' beliefs at up to `most` of the measured places where every head is asked, spread evenly."""
    asked = np.flatnonzero((measured.ranks_NK != NOT_ASKED).all(axis=1))
    chosen = asked[np.linspace(0, len(asked) - 1, min(most, len(asked))).astype(np.int64)]
    rows_N = examples.rows_at(measured.places_N[chosen])
    batches = [rows_N[start : start + _BATCH] for start in range(0, len(rows_N), _BATCH)]
    if heads.config.looks_back:
        pairs = Pairs(cast(BlockHeads, heads))
        return TrieBeliefs.of([one for rows_B in batches for one in _tries(heads, examples, rows_B, pairs)])
    if heads.config.sees_path:
        return PathBeliefs([_judged(heads, examples, rows_B, num_ranks) for rows_B in batches])
    ranks_NK = torch.from_numpy(measured.ranks_NK[chosen].astype(np.int64)).clamp(max=num_ranks)
    return HeadBeliefs(torch.cat([_logp(heads, examples, rows_B, num_ranks) for rows_B in batches]), ranks_NK)


@dataclass(frozen=True)
class HeadBeliefs:
    """logp_NKR: each head's R best tokens' log-chances; ranks_NK: where the true token is among them, R for a miss."""

    logp_NKR: Tensor
    ranks_NK: Tensor

    def replay(self, shape: DynamicShape) -> Replay:
        """Heads that don't see each other: a node is right when its rank is the true token's."""
        kept, sizes = 0, Counter[int]()
        for logp_BKR, ranks_BK in zip(self.logp_NKR.split(_BATCH), self.ranks_NK.split(_BATCH), strict=True):
            tree = dynamic_tree(logp_BKR, shape.size, shape.floor)
            true_BM = ranks_BK.gather(1, (tree.depths_XN - 1).clamp(min=0))
            right_BM = (true_BM == tree.ranks_XN) & tree.real_XN
            right_BM[:, 0] = True
            alive_BM = (right_BM[:, None] | ~tree.ancestors_XNN).all(-1)
            kept += int((alive_BM * tree.depths_XN).amax(1).sum())
            sizes.update(tree.real_XN.sum(1).tolist())
        return Replay(1 + kept / len(self.ranks_NK), sizes)


@dataclass(frozen=True)
class Judged:
    """Candidates of B places, and which of their whole paths were right [B, C]."""

    found: Candidates
    right_BC: Tensor


@dataclass(frozen=True)
class PathBeliefs:
    """Heads that see the guesses above theirs: every candidate they had, with the truth about it."""

    batches: list[Judged]

    def replay(self, shape: DynamicShape) -> Replay:
        """A node is right when its whole path is."""
        kept, sizes = 0, Counter[int]()
        for batch in self.batches:
            taken_BM, real_BM = likeliest_of(batch.found, shape)
            depths_C = torch.tensor(batch.found.depths_C)
            kept += int((depths_C[taken_BM] * batch.right_BC.gather(1, taken_BM) * real_BM).amax(1).sum())
            sizes.update(real_BM.sum(1).tolist())
        return Replay(1 + kept / sum(len(batch.right_BC) for batch in self.batches), sizes)


@dataclass(frozen=True)
class TrieBeliefs:
    """Guesses gathered best-first: chance_NM of each place's nodes as they fall, 0 where it has no more, and the depth
    of those whose whole path was right, else 0, in depth_NM.
    """

    chance_NM: NDArray[np.float64]
    depth_NM: NDArray[np.int64]

    @classmethod
    def of(cls, found: Sequence[tuple[list[float], list[int]]]) -> "TrieBeliefs":
        """Of each place its nodes' chances and depths."""
        chance_NM, depth_NM = np.zeros((len(found), _MOST_NODES)), np.zeros((len(found), _MOST_NODES), np.int64)
        for place, (chances, depths) in enumerate(found):
            chance_NM[place, : len(chances)], depth_NM[place, : len(depths)] = chances, depths
        return cls(chance_NM, depth_NM)

    def replay(self, shape: DynamicShape) -> Replay:
        """The first so many that are likely enough."""
        taken_NM = self.chance_NM[:, : shape.size] >= max(shape.floor, np.finfo(np.float64).tiny)
        kept = int((self.depth_NM[:, : shape.size] * taken_NM).max(axis=1).sum())
        return Replay(1 + kept / len(taken_NM), Counter((1 + taken_NM.sum(axis=1)).tolist()))


@torch.no_grad()
def _tries(
    heads: Heads, examples: Examples, rows_B: NDArray[np.int64], pairs: Pairs
) -> Iterator[tuple[list[float], list[int]]]:
    """Of each place the likeliest guesses: their chances, and their depths where they were right."""
    device, size = heads.device, heads.config.hidden_size
    guessed_BKH = heads.block_forward(examples.inputs(heads, rows_B, device, heads.dtype))[..., :size]
    found = places_of(cast(BlockHeads, heads), pairs, guessed_BKH)
    roots, truth = examples.paths(rows_B)[:, 0].tolist(), examples.following(rows_B).tolist()
    for places, root, true in zip(found, roots, truth, strict=True):
        trie = Trie(root)
        places.add_likeliest(trie, _MOST_NODES)
        right = {ROOT: 0}  # nodes whose whole path was right, and their depths
        for node in range(1, len(trie.tokens)):
            depth = right.get(trie.parents[node])
            if depth is not None and trie.tokens[node] == true[depth]:
                right[node] = depth + 1
        order = trie.likeliest(_MOST_NODES)
        yield [trie.chances[node] for node in order], [right.get(node, 0) for node in order]


@torch.no_grad()
def _logp(heads: Heads, examples: Examples, rows_B: NDArray[np.int64], num_ranks: int) -> Tensor:
    """Log-chances [B, K, R] of the best guesses, on the host."""
    device = heads.device
    hidden_BH = examples.hidden(rows_B, device).to(heads.dtype)
    logits_BKW = heads(heads.inputs(hidden_BH, examples.paths(rows_B, device)))
    return logits_BKW.float().log_softmax(-1).topk(num_ranks, dim=-1).values.cpu()


@torch.no_grad()
def _judged(heads: Heads, examples: Examples, rows_B: NDArray[np.int64], size: int) -> Judged:
    """The candidates for trees of up to `size` nodes, on the host, held against what the text says."""
    device = heads.device
    hidden_BH = examples.hidden(rows_B, device).to(heads.dtype)
    found = guesses(heads.by_level(), hidden_BH, examples.paths(rows_B, device)[:, 0], size).cpu()
    truth_BK = examples.following(rows_B)
    depths_C = torch.tensor(found.depths_C)
    right_BC = (depths_C == 0).expand_as(found.tokens_BC).clone()
    for depth in range(1, int(depths_C.max()) + 1):
        at_C = (depths_C == depth).nonzero()[:, 0]
        true_BC = found.tokens_BC[:, at_C] == truth_BK[:, depth - 1 : depth]
        right_BC[:, at_C] = right_BC.gather(1, found.parents_BC[:, at_C]) & true_BC
    return Judged(found, right_BC)
