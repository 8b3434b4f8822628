"""Down a tree with hydra heads: each level's guesses are told to the heads below (Hydra, arXiv 2402.05109).

Shape letters: B rows, M nodes of a level, K heads, k heads that are left, R ranks, W draft vocabulary, H hidden,
C candidates with the root.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_cli.contracts import PathHeads


class Walk:
    """The heads' first sums for every node of one level; `down` goes one level deeper.

    Head d guesses what follows a node of depth d. A node's sums are those of its parent and what its own token brings.
    """

    def __init__(self, heads: PathHeads, hidden_BH: Tensor, root_B: Tensor) -> None:
        self.heads = heads
        self.depth = 0
        self._hidden_B1H = hidden_BH[:, None]
        inputs = heads.inputs(hidden_BH, root_B[:, None])
        self._sums_BMkH = heads.first_sums(inputs)[:, None]

    def logits(self) -> Tensor:
        """What follows each node of this level: draft logits [B, M, W]."""
        return self.heads.head_logits(self._hidden_B1H, self._sums_BMkH[:, :, 0], self.depth)

    def down(self, parents_BM: Tensor, ids_BM: Tensor) -> None:
        """The next level: nodes of these target ids under these nodes of the present one."""
        index = parents_BM[..., None, None].expand(-1, -1, *self._sums_BMkH.shape[2:])
        self.depth += 1
        brought_BMkH = self.heads.path_sums(self.heads.guess_rows(ids_BM), self.depth)
        self._sums_BMkH = self._sums_BMkH.gather(1, index)[:, :, 1:] + brought_BMkH


@dataclass(frozen=True)
class Candidates:
    """Guesses of all levels, level by level after the root: the token, its parent, its rank among the parent's guesses,
    and the log-chance of its whole path, each [B, C]; depths_C alike for all rows."""

    tokens_BC: Tensor
    parents_BC: Tensor
    ranks_BC: Tensor
    logp_BC: Tensor
    depths_C: Sequence[int]

    def cpu(self) -> "Candidates":
        """On the host."""
        return Candidates(
            self.tokens_BC.cpu(), self.parents_BC.cpu(), self.ranks_BC.cpu(), self.logp_BC.cpu(), self.depths_C
        )


def candidates(
    heads: PathHeads, hidden_BH: Tensor, root_B: Tensor, *, beam: int, num_ranks: int, floor: float = 0.0
) -> Candidates:
    """The best `num_ranks` guesses after the root and after each of the `beam` likeliest nodes of every level.

    The construction of EAGLE-2 (arXiv 2406.16858). A child is never likelier than its parent, and stands behind it.
    With a floor, nodes of a smaller chance are not asked what follows them: one host read a level.
    """
    walk = Walk(heads, hidden_BH, root_B)
    num_rows, num_heads = len(root_B), heads.config.num_heads
    above_BM = hidden_BH.new_zeros(num_rows, 1, dtype=torch.float32)  # log-chances of the level that is asked
    nodes_BM = torch.zeros_like(root_B)[:, None]  # its places among the candidates
    tokens, parents, ranks, logp = [root_B[:, None]], [nodes_BM], [nodes_BM], [above_BM]
    depths = [0]
    for depth in range(num_heads):
        best = walk.logits().float().log_softmax(-1).topk(num_ranks, dim=-1)
        ids_BC = heads.to_target_ids(best.indices).flatten(1)
        logp_BC = (above_BM[..., None] + best.values).flatten(1)
        tokens.append(ids_BC)
        parents.append(nodes_BM.repeat_interleave(num_ranks, dim=1))
        ranks.append(torch.arange(num_ranks, device=root_B.device).repeat(num_rows, nodes_BM.shape[1]))
        logp.append(logp_BC)
        first = len(depths)
        depths += [depth + 1] * ids_BC.shape[1]
        if depth + 1 < num_heads:
            above_BM, chosen_BM = logp_BC.topk(min(beam, logp_BC.shape[1]), dim=1)
            if floor:
                width = int((above_BM >= math.log(floor)).sum(1).max())
                if not width:
                    break
                above_BM, chosen_BM = above_BM[:, :width], chosen_BM[:, :width]
            nodes_BM = first + chosen_BM
            walk.down(chosen_BM // num_ranks, ids_BC.gather(1, chosen_BM))
    return Candidates(
        tokens_BC=torch.cat(tokens, dim=1),
        parents_BC=torch.cat(parents, dim=1),
        ranks_BC=torch.cat(ranks, dim=1),
        logp_BC=torch.cat(logp, dim=1),
        depths_C=depths,
    )
