"""Arithmetic shared by the rules: from "this node is right" to the path that survives.

Shape letters: B rows, N tree nodes, D places on a path, V vocabulary.
"""

import torch
from torch import Tensor

from medusa_cli.contracts import Draft, Verdict
from medusa_cli.trees.tree import TokenTree


def verdict_from(draft: Draft, chosen_BN: Tensor) -> Verdict:
    """The verdict when the target puts token chosen_BN[b, n] after node n.

    A node is right when its token is what the target chose after its parent; it lives when every node above it is
    right too. The deepest living node wins (the first of them on a tie, which only duplicate siblings can cause).
    """
    tree = draft.tree
    parents_BN = tree.parents_XN.expand(len(chosen_BN), -1)
    right_BN = (draft.tokens_BN == chosen_BN.gather(1, parents_BN)) & tree.real_XN
    right_BN[:, 0] = True
    alive_BN = (right_BN[:, None] | ~tree.ancestors_XNN).all(-1)
    winner_B = (alive_BN * (tree.depths_XN + 1)).argmax(-1)
    path_BD = path_to(tree, winner_B)
    return Verdict(path_BD, (path_BD >= 0).sum(-1), chosen_BN.gather(1, winner_B[:, None])[:, 0])


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
