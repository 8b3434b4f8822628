"""Medusa's draft in a tree of its own for every row and step: the paths the heads are surest of.

The construction of EAGLE-2 (arXiv 2406.16858) for heads that don't see each other.
Shape letters: B rows, N tree nodes, K heads, R ranks, H hidden.
"""

import torch

from medusa_cli.contracts import Context, Draft, DraftHeads
from medusa_cli.trees.dynamic import DynamicShape, dynamic_tree

MOST_RANKS = 16  # a path through a worse choice is never among the likeliest few hundred in practice


class DynamicMedusaDrafter:
    """Easy places get deep trees, hard ones shallow trees, or none."""

    name = "medusa"

    def __init__(self, heads: DraftHeads, shape: DynamicShape) -> None:
        self.heads = heads
        self.shape = shape
        self.size = shape.size
        self.num_ranks = min(MOST_RANKS, shape.size, heads.config.draft_vocab)

    def start(self, context: Context) -> None:
        """Heads remember nothing between steps."""

    @torch.inference_mode()
    def propose(self, context: Context) -> Draft:
        """Each row's likeliest paths under its root; siblings are distinct because ranks are."""
        logits_BKW = self.heads(self.heads.inputs(context.hidden_BH, context.root_B[:, None]))
        best = logits_BKW.float().log_softmax(-1).topk(self.num_ranks, dim=-1)
        tree = dynamic_tree(best.values, self.shape.size, self.shape.floor)
        ids_BC = self.heads.to_target_ids(best.indices).flatten(1)
        entry_BN = (tree.depths_XN - 1).clamp(min=0) * self.num_ranks + tree.ranks_XN
        tokens_BN = ids_BC.gather(1, entry_BN)
        tokens_BN[:, 0] = context.root_B
        return Draft(tokens_BN, tree)
