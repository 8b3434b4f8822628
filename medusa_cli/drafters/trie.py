"""Guessed texts under one root, from any number of sources: a path that several guess is one path.

Every drafter that gathers guesses on the host pours them through here. A node's chance is that of its whole path, so a
child is never likelier than its parent, and the likeliest nodes always make a tree.
Shape letters: B rows, N tree nodes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from medusa_cli.contracts import Draft
from medusa_cli.trees.tree import TokenTree

ROOT = 0


class Trie:
    """Node n guesses tokens[n] after its parent with the chance that the path down to it is right; node 0 is root."""

    def __init__(self, root: int) -> None:
        self.tokens = [root]
        self.parents = [ROOT]
        self.chances = [1.0]
        self._children: list[dict[int, int]] = [{}]

    def add_guess(self, node: int, token: int, chance: float) -> int:
        """The node for this token under `node`; `chance` is that of the whole path. The higher of two beliefs stays."""
        chance = min(chance, self.chances[node])
        child = self._children[node].get(token)
        if child is None:
            child = len(self.tokens)
            self._children[node][token] = child
            self.tokens.append(token)
            self.parents.append(node)
            self.chances.append(chance)
            self._children.append({})
        elif chance > self.chances[child]:
            self.chances[child] = chance
        return child

    def child(self, node: int, token: int) -> int | None:
        """The node for this token under `node`, if there is one."""
        return self._children[node].get(token)

    def add_path(self, path: Sequence[int], chances: Iterable[float], node: int = ROOT) -> None:
        """A path of guesses under `node` with the chance of each prefix, as far as there are chances."""
        for token, chance in zip(path, chances, strict=False):
            node = self.add_guess(node, token, chance)

    def likeliest(self, size: int) -> list[int]:
        """At most `size` nodes by falling chance, parents before children, the root left out."""
        # A parent was made before its child, so a stable sort keeps it in front between equals.
        return sorted(range(1, len(self.tokens)), key=lambda node: -self.chances[node])[:size]


@dataclass(frozen=True)
class Picked:
    """The nodes of a row that are drafted, in an order in which parents come first."""

    trie: Trie
    nodes: Sequence[int]


def draft_of(rows: Sequence[Picked], device: torch.device) -> Draft:
    """One draft for all rows, padded to the largest of them; siblings are ranked by their order."""
    num_nodes = 1 + max(len(row.nodes) for row in rows)
    lines = [_line(row, num_nodes) for row in rows]
    # one transfer for all of it
    packed_B4N = torch.tensor(lines).to(device)
    tokens_BN, parents_BN, ranks_BN, real_BN = packed_B4N.unbind(1)
    return Draft(tokens_BN, TokenTree(parents_BN, ranks_BN, real_BN.bool()))


def _line(row: Picked, num_nodes: int) -> list[list[int]]:
    """A row's tokens, parents, ranks, and which nodes are no padding."""
    place = {ROOT: 0, **{node: place for place, node in enumerate(row.nodes, start=1)}}
    parents = [0, *(place[row.trie.parents[node]] for node in row.nodes)]
    born = [0] * num_nodes
    ranks = [0]
    for parent in parents[1:]:
        ranks.append(born[parent])
        born[parent] += 1
    missing = num_nodes - len(parents)
    tokens = [row.trie.tokens[ROOT], *(row.trie.tokens[node] for node in row.nodes)]
    return [each + [0] * missing for each in (tokens, parents, ranks, [1] * len(parents))]
