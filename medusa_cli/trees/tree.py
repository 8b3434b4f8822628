"""TokenTree: the shape of a draft. It holds no tokens and knows no model.

Shape letters: X = 1 (one tree for all rows) or B (one each), N nodes with the root, D places on a path.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from medusa_cli.errors import TreeError

Path = tuple[int, ...]


class TokenTree:
    """One tree for all rows (X = 1) or one for each (X = B); frozen once made.

    parents_XN    node 0 is the root and its own parent; parents come before their children
    ranks_XN      node n is its head's ranks[n]-th choice (0 = best); 0 for the root
    real_XN       False for padding nodes, which are never accepted
    depths_XN     0 for the root; the head that guesses a node is depth - 1
    ancestors_XNN [n, m] is True when m is n or above n: the attention mask among the nodes
    """

    def __init__(self, parents_XN: Tensor, ranks_XN: Tensor, real_XN: Tensor | None = None) -> None:
        self.parents_XN = parents_XN
        self.ranks_XN = ranks_XN
        self.real_XN = torch.ones_like(parents_XN, dtype=torch.bool) if real_XN is None else real_XN
        self.depths_XN, self.ancestors_XNN = _derive(parents_XN)

    @cached_property
    def max_depth(self) -> int:
        """The deepest node's depth: the most guesses one step can accept."""
        return int(self.depths_XN.max())

    @property
    def num_nodes(self) -> int:
        """N, the root included: the number of rows of the mask."""
        return self.parents_XN.shape[1]

    def to(self, device: torch.device | str) -> "TokenTree":
        """The same tree with its tensors on `device`; itself when they are there already."""
        if self.parents_XN.device == torch.device(device):
            return self
        return TokenTree(self.parents_XN.to(device), self.ranks_XN.to(device), self.real_XN.to(device))

    def paths(self, row: int = 0) -> list[Path]:
        """The rank path from the root of every real node but the root, in node order."""
        parents, ranks = self.parents_XN[row].tolist(), self.ranks_XN[row].tolist()
        real = self.real_XN[row].tolist()
        found: list[Path] = [()]
        for node in range(1, len(parents)):
            found.append((*found[parents[node]], ranks[node]))
        return [path for node, path in enumerate(found) if node and real[node]]

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> "TokenTree":
        """The tree with exactly these rank paths, sorted so that parents come first.

        Raises TreeError when a path is empty, repeated, negative, or lacks its prefix. No path at all gives
        the empty tree: the root alone, plain decoding.
        """
        wanted = [tuple(path) for path in paths]
        _check_paths(wanted)
        order = sorted(wanted, key=lambda path: (len(path), path))
        index = {(): 0, **{path: n for n, path in enumerate(order, start=1)}}
        parents = [0, *(index[path[:-1]] for path in order)]
        ranks = [0, *(path[-1] for path in order)]
        return cls(torch.tensor([parents]), torch.tensor([ranks]))

    @classmethod
    def chain(cls, length: int) -> "TokenTree":
        """A root and `length` nodes, each the best guess under the one before."""
        return cls(torch.arange(-1, length).clamp(min=0)[None], torch.zeros(1, length + 1, dtype=torch.long))

    @classmethod
    def empty(cls) -> "TokenTree":
        """The root alone."""
        return cls.chain(0)

    def check_fits(self, num_heads: int, num_ranks: int) -> None:
        """Raise TreeError when a path needs a head or a rank that isn't there."""
        for path in self.paths():
            if len(path) > num_heads:
                raise TreeError(
                    f"path {list(path)} needs head {len(path)}; {num_heads} present",
                    "use a tree no deeper than the heads, or train more heads (--num-heads)",
                )
            if path[-1] >= num_ranks:
                raise TreeError(
                    f"path {list(path)} asks for rank {path[-1]}; a head offers ranks 0 to {num_ranks - 1}",
                    "use smaller ranks, or a larger draft vocabulary",
                )


def _check_paths(paths: list[Path]) -> None:
    """Raise TreeError, naming the first path at fault."""
    present = {()}
    for path in sorted(paths, key=len):
        if not path:
            raise TreeError("an empty path [] is in the tree", "the root is implied: leave it out")
        if any(not isinstance(rank, int) or isinstance(rank, bool) or rank < 0 for rank in path):
            raise TreeError(f"path {list(path)} holds something that is no rank", "ranks are whole numbers from 0")
        if path in present:
            raise TreeError(f"path {list(path)} is in the tree twice", "name each node once")
        if path[:-1] not in present:
            raise TreeError(
                f"path {list(path)} lacks its prefix {list(path[:-1])}", "add every node on the way from the root"
            )
        present.add(path)


def _derive(parents_XN: Tensor) -> tuple[Tensor, Tensor]:
    """Depths and ancestors of all nodes, by repeated squaring of the parent relation: no host reads."""
    num_nodes = parents_XN.shape[1]
    # One hop up, or staying: a boolean matrix whose closure relates each node to all nodes above it.
    above_XNN = torch.eye(num_nodes, dtype=torch.bool, device=parents_XN.device).repeat(len(parents_XN), 1, 1)
    above_XNN.scatter_(2, parents_XN[..., None], True)
    for _ in range(max(1, (num_nodes - 1).bit_length())):
        above_XNN = (above_XNN.float() @ above_XNN.float()) > 0
    return above_XNN.sum(-1) - 1, above_XNN
