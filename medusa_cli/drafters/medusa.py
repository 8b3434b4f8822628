"""Medusa's draft: head k's best tokens at depth k + 1, poured into a fixed tree (arXiv 2401.10774).

Shape letters: B rows, N tree nodes, K heads, R ranks, H hidden.
"""

import torch

from medusa_cli.contracts import Context, Draft, DraftHeads
from medusa_cli.trees.tree import TokenTree


class MedusaDrafter:
    """Heads on the hidden state that decided the root guess what follows the root."""

    name = "medusa"

    def __init__(self, heads: DraftHeads, tree: TokenTree) -> None:
        """Raises TreeError when the tree needs a head or rank that isn't there."""
        tree.check_fits(heads.config.num_heads, heads.config.draft_vocab)
        self.heads = heads
        self.tree = tree
        self.size = tree.num_nodes - 1
        self.num_ranks = int(tree.ranks_XN.max()) + 1
        # Nodes of head k read entry (k, rank) of the heads' best tokens; the root's entry is overwritten.
        self.entry_N = (tree.depths_XN[0] - 1).clamp(min=0) * self.num_ranks + tree.ranks_XN[0]

    def start(self, context: Context) -> None:
        """Heads remember nothing between steps."""

    @torch.inference_mode()
    def propose(self, context: Context) -> Draft:
        """Best tokens of each head under each row's root; siblings are distinct because ranks are."""
        inputs = self.heads.inputs(context.hidden_BH, context.root_B[:, None])
        best_BKR = self.heads(inputs).topk(self.num_ranks, dim=-1).indices
        tokens_BN = self.heads.to_target_ids(best_BKR).flatten(1)[:, self.entry_N.to(best_BKR.device)]
        tokens_BN[:, 0] = context.root_B
        return Draft(tokens_BN, self.tree.to(tokens_BN.device))
