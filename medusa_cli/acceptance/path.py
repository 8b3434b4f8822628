"""Arithmetic shared by the rules: from "this node is right" to the path that survives.

Shape letters: B rows, N tree nodes, D places on a path, V vocabulary.
"""

import torch
from torch import Tensor

from medusa_cli.contracts import Draft, Verdict
from medusa_cli.trees.tree import TokenTree


def verdict_from(draft: Draft, chosen_BN: Tensor) -> Verdict:
    """The verdict when the target puts token chosen_BN[b, n] after node n: a node is right when it holds that token.

    One path at most is right (two on a tie of duplicate siblings, of which the first wins).
    """
    parents_BN = draft.tree.parents_XN.expand(len(chosen_BN), -1)
    return verdict_of(draft, draft.tokens_BN == chosen_BN.gather(1, parents_BN), chosen_BN)


def verdict_of(draft: Draft, right_BN: Tensor, next_BN: Tensor, logp_BN: Tensor | None = None) -> Verdict:
    """The verdict when these nodes are right after their parents, and next_BN[b, n] follows if node n is the last kept.

    A node lives when it and every node above it are right. The deepest living node wins; between equally deep ones the
    one whose path sums up to most in logp_BN, or the first.
    """
    tree = draft.tree
    right_BN = right_BN & tree.real_XN
    right_BN[:, 0] = True
    ancestors_XNN = tree.ancestors_XNN
    alive_BN = (right_BN[:, None] | ~ancestors_XNN).all(-1)
    depth_BN = alive_BN * (tree.depths_XN + 1)
    if logp_BN is not None:
        deepest_BN = depth_BN == depth_BN.amax(1, keepdim=True)
        path_BN = torch.where(ancestors_XNN, logp_BN[:, None], 0).sum(-1)
        winner_B = path_BN.masked_fill(~deepest_BN, -torch.inf).argmax(-1)
    else:
        winner_B = depth_BN.argmax(-1)
    path_BD = path_to(tree, winner_B)
    return Verdict(path_BD, (path_BD >= 0).sum(-1), next_BN.gather(1, winner_B[:, None])[:, 0])


def log_chances(draft: Draft, p_BNV: Tensor) -> Tensor:
    """The log-probability of each node's token after its parent [B, N]; 0 for the root."""
    num_rows, num_nodes = draft.tokens_BN.shape
    parents_BN = draft.tree.parents_XN.expand(num_rows, -1)
    after_BNV = p_BNV.gather(1, parents_BN[..., None].expand(-1, -1, p_BNV.shape[-1]))
    logp_BN = after_BNV.gather(2, draft.tokens_BN[..., None])[..., 0].log()
    logp_BN[:, 0] = 0
    return logp_BN


def path_to(tree: TokenTree, node_B: Tensor) -> Tensor:
    """Nodes from the root down to node_B [B, D], -1 past the end."""
    num_rows, num_nodes = len(node_B), tree.num_nodes
    index_BN = node_B[:, None, None].expand(-1, 1, num_nodes)
    above_BN = tree.ancestors_XNN.expand(num_rows, -1, -1).gather(1, index_BN)[:, 0]
    # Nodes off the path are written to one place past the end, which is then cut off.
    places = tree.max_depth + 1
    place_BN = torch.where(above_BN, tree.depths_XN, places)
    nodes_BN = torch.arange(num_nodes, device=node_B.device).expand(num_rows, -1)
    path = torch.full((num_rows, places + 1), -1, dtype=torch.long, device=node_B.device)
    return path.scatter(1, place_BN, nodes_BN)[:, :places]
