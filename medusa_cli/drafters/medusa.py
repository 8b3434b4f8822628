"""Medusa's draft: head k's best tokens at depth k + 1, in a fixed tree or one of their own for every row and step.

arXiv 2401.10774; trees of their own by the construction of EAGLE-2 (arXiv 2406.16858) for heads that don't see each
other. Shape letters: B rows, N tree nodes, K heads, R ranks, W draft vocabulary.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from math import exp

import torch
from torch import Tensor

from medusa_cli.contracts import Context, Draft, DraftHeads
from medusa_cli.drafters.memory import NoMemory
from medusa_cli.drafters.trie import ROOT, Trie
from medusa_cli.trees.dynamic import DynamicShape, dynamic_tree
from medusa_cli.trees.tree import TokenTree

MOST_RANKS = 16  # a path through a worse choice is never among the likeliest few hundred in practice


class MedusaDrafter(NoMemory):
    """Heads on the hidden state that decided the root guess what follows the root; a source of guesses as well.

    With a dynamic shape, easy places get deep trees, hard ones shallow trees, or none.
    """

    def __init__(self, heads: DraftHeads, shape: TokenTree | DynamicShape) -> None:
        """Raises TreeError when a fixed tree needs a head or rank that isn't there."""
        self.name = heads.config.type
        self.heads = heads
        self.shape = shape
        if isinstance(shape, TokenTree):
            shape.check_fits(heads.config.num_heads, heads.config.draft_vocab)
            self.size = shape.num_nodes - 1
            self.num_ranks = int(shape.ranks_XN.max()) + 1
        else:
            self.size = shape.size
            self.num_ranks = min(MOST_RANKS, shape.size, heads.config.draft_vocab)

    @torch.inference_mode()
    def propose(self, context: Context) -> Draft:
        """Best tokens of each head under each row's root; siblings are distinct because ranks are."""
        logits_BKW = self._logits(context)
        if isinstance(self.shape, TokenTree):
            best_BKR, tree = logits_BKW.topk(self.num_ranks, dim=-1).indices, self.shape.to(logits_BKW.device)
        else:
            best = logits_BKW.float().log_softmax(-1).topk(self.num_ranks, dim=-1)
            best_BKR, tree = best.indices, dynamic_tree(best.values, self.shape.size, self.shape.floor)
        # nodes of head k hold entry (k, rank) of the best tokens; the root's entry is overwritten
        entry_XN = (tree.depths_XN - 1).clamp(min=0) * self.num_ranks + tree.ranks_XN
        ids_BC = self.heads.to_target_ids(best_BKR).flatten(1)
        tokens_BN = ids_BC.gather(1, entry_XN.expand(len(ids_BC), -1))
        tokens_BN[:, 0] = context.root_B
        return Draft(tokens_BN, tree)

    def add_guesses(self, context: Context, tries: Sequence[Trie], floor: float) -> None:
        """The `size` likeliest paths of each row, by the product of the heads' chances."""
        best = self._logits(context).float().log_softmax(-1).topk(self.num_ranks, dim=-1)
        ids_BKR = self.heads.to_target_ids(best.indices).tolist()
        for trie, ids_KR, logp_KR in zip(tries, ids_BKR, best.values.tolist(), strict=True):
            _add_likeliest(trie, ids_KR, logp_KR, self.size, floor)

    def _logits(self, context: Context) -> Tensor:
        """What the heads say [B, K, W]."""
        logits_BKW: Tensor = self.heads(self.heads.inputs(context.hidden_BH, context.root_B[:, None]))
        return logits_BKW


def _add_likeliest(
    trie: Trie, ids_KR: Sequence[Sequence[int]], logp_KR: Sequence[Sequence[float]], size: int, floor: float
) -> None:
    """Best-first: after a path come its next sibling and its first child, neither of which is likelier."""
    waiting = [(-logp_KR[0][0], 0, 0, ROOT, 0.0)]  # (cost, head, rank, parent, log-chance of the parent)
    for _ in range(size):
        if not waiting:
            return
        cost, head, rank, parent, before = heappop(waiting)
        if exp(-cost) < floor:
            return
        node = trie.add_guess(parent, ids_KR[head][rank], exp(-cost))
        if rank + 1 < len(ids_KR[head]):
            heappush(waiting, (-(before + logp_KR[head][rank + 1]), head, rank + 1, parent, before))
        if head + 1 < len(ids_KR):
            heappush(waiting, (cost - logp_KR[head + 1][0], head + 1, 0, node, -cost))
