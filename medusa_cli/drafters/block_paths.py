"""Paths through a block's places: the likeliest ones, each token's chance in view of the one before it on its path.

On the host, by a table of pairs: a node's children cost one small product, and only nodes that are reached are asked.
Shape letters: B blocks, K places, C candidates of a place, H hidden, R rank, W draft vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medusa_cli.drafters.trie import ROOT, Trie
from medusa_cli.heads.block import BlockHeads

CANDIDATES = 64  # tokens of a place that are looked at: a pair lifts none from far below them
RANKS = 12  # guesses after one node


class Guess(NamedTuple):
    """A token that may come next: its id, its row of the table, and its chance given the path before it."""

    token: int
    row: int
    chance: float


class Pairs:
    """The table of pairs on the host: what a token brings, and what that is worth to each token after it."""

    def __init__(self, heads: BlockHeads) -> None:
        self.before_WR = _numbers(heads.output_before_weight)
        self.after_WR = _numbers(heads.output_after_weight)
        hidden = heads.config.hidden_size
        self.sure_W: NDArray[np.float32] = self.before_WR.dot(_numbers(heads.confidence_weight[hidden:]))
        assert heads.row_of is not None
        self.row_of = heads.row_of.cpu().numpy()


@dataclass(frozen=True)
class Places:
    """What one block guesses, before any path is known.

    ids_KC, rows_KC   candidates of each place: target ids, and rows of the table
    logits_KC         theirs without pairs, and
    rest_K            the log of all other tokens' mass
    sure_K            log-odds that the place is right, without what the token before it says
    """

    pairs: Pairs
    ids_KC: NDArray[np.int64]
    rows_KC: NDArray[np.int64]
    logits_KC: NDArray[np.float32]
    rest_K: NDArray[np.float32]
    sure_K: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.ids_KC)

    def after(self, place: int, row: int, count: int) -> list[Guess]:
        """The `count` likeliest tokens at a place behind the token of this row, the best first."""
        pairs = self.pairs
        rows_C = self.rows_KC[place]
        logits_C = self.logits_KC[place] + pairs.after_WR[rows_C] @ pairs.before_WR[row]
        best_C = np.argsort(-logits_C)[:count]
        top = float(logits_C[best_C[0]])
        masses_C = np.exp(logits_C - top)
        mass = float(masses_C.sum()) + math.exp(min(float(self.rest_K[place]) - top, 60.0))
        odds = float(self.sure_K[place]) + float(pairs.sure_W[row])
        sure = 1 / (1 + math.exp(-max(-60.0, min(60.0, odds))))
        chances = masses_C[best_C] * (sure / mass)
        ids, rows = self.ids_KC[place, best_C], rows_C[best_C]
        return list(map(Guess, ids.tolist(), rows.tolist(), chances.tolist()))

    def add_likeliest(self, trie: Trie, size: int, floor: float = 0.0) -> None:
        """Add up to `size` paths, best-first; none of a chance below the floor."""
        count = min(RANKS, size)
        guesses = self.after(0, int(self.pairs.row_of[trie.tokens[ROOT]]), count)
        # (cost, a number that tells equals apart, place, rank, siblings, parent, its chance)
        waiting = [(-guesses[0].chance, 0, 0, 0, guesses, ROOT, 1.0)]
        made = 1
        for _ in range(size):
            if not waiting:
                return
            cost, _, place, rank, siblings, parent, before = heappop(waiting)
            if -cost < floor:
                return
            node = trie.add_guess(parent, siblings[rank].token, -cost)
            if rank + 1 < len(siblings):
                heappush(
                    waiting, (-before * siblings[rank + 1].chance, made, place, rank + 1, siblings, parent, before)
                )
            if place + 1 < len(self):
                children = self.after(place + 1, siblings[rank].row, count)
                heappush(waiting, (cost * children[0].chance, made + 1, place + 1, 0, children, node, -cost))
            made += 2

    def fill(self, root: int, parents: Sequence[int], ranks: Sequence[int]) -> list[int]:
        """The tokens of a tree of this shape, parents before children, the root first."""
        tokens, rows, depths = [root], [int(self.pairs.row_of[root])], [0]
        children: dict[int, list[Guess]] = {}
        most = max(ranks) + 1
        for parent, rank in zip(parents[1:], ranks[1:], strict=True):
            if parent not in children:
                children[parent] = self.after(depths[parent], rows[parent], most)
            found = children[parent][rank]
            tokens.append(found.token)
            rows.append(found.row)
            depths.append(depths[parent] + 1)
        return tokens


def places_of(heads: BlockHeads, pairs: Pairs, guessed_BKH: Tensor) -> list[Places]:
    """What blocks guess, from what the output sees of their places: one transfer to the host."""
    logits_BKW = heads.projection(0).own_logits(guessed_BKH)
    hidden = guessed_BKH.shape[-1]
    best = logits_BKW.topk(min(CANDIDATES, logits_BKW.shape[-1]), dim=-1)
    all_BK = logits_BKW.float().logsumexp(-1)
    mine_BK = best.values.float().logsumexp(-1)
    # log(exp(all) - exp(mine)), where nearly all of the mass is theirs too
    rest_BK = all_BK + torch.log1p(-torch.exp(mine_BK - all_BK).clamp(max=1 - 1e-7))
    sure_BK = guessed_BKH @ heads.confidence_weight[:hidden] + heads.confidence_bias
    ids_BKC = heads.to_target_ids(best.indices).cpu().numpy()
    rows_BKC = best.indices.cpu().numpy()
    numbers = [_numbers(each) for each in (best.values, rest_BK, sure_BK)]
    return [Places(pairs, *each) for each in zip(ids_BKC, rows_BKC, *numbers, strict=True)]


def _numbers(tensor: Tensor) -> NDArray[np.float32]:
    """On the host."""
    numbers: NDArray[np.float32] = tensor.detach().float().cpu().numpy()
    return numbers
