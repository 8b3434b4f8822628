"""TokenTree: the shape of a draft. It holds no tokens and knows no model.

Shape letters: X = 1 (one tree for all rows) or B (one each), N nodes with the root, D places on a path.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from medusa_cli.errors import TreeError

Path = tuple[int, ...]


class Ancestry(Protocol):
    """Of a tree what masks and positions need."""

    @property
    def num_nodes(self) -> int:
        """N, the root included."""

    @property
    def ancestors_XNN(self) -> Tensor:
        """[n, m] is True when m is n or above n."""

    @property
    def depths_XN(self) -> Tensor:
        """0 for the root."""


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
        self._derive(_ancestors(parents_XN))

    def _derive(self, ancestors_XNN: Tensor) -> None:
        """What follows from who is above whom."""
        self.ancestors_XNN = ancestors_XNN
        self.depths_XN = ancestors_XNN.sum(-1) - 1
        self._elsewhere: dict[torch.device | str, TokenTree] = {}

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
        if torch.device(device) == self.parents_XN.device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = TokenTree(
                self.parents_XN.to(device), self.ranks_XN.to(device), self.real_XN.to(device)
            )
        return self._elsewhere[device]

    def of_rows(self, rows: Sequence[int]) -> "TokenTree":
        """The trees of these rows: itself where all rows share one."""
        if len(self.parents_XN) == 1:
            return self
        members = list(rows)
        part = TokenTree.__new__(TokenTree)
        part.parents_XN, part.ranks_XN = self.parents_XN[members], self.ranks_XN[members]
        part.real_XN = self.real_XN[members]
        part._derive(self.ancestors_XNN[members])
        return part

    def only_in(self, speculate_B: Tensor) -> "TokenTree":
        """A tree for each row: this one where speculate_B is True, elsewhere the root and padding."""
        num_rows = len(speculate_B)
        other = TokenTree.__new__(TokenTree)
        other.parents_XN, other.ranks_XN = self.parents_XN.expand(num_rows, -1), self.ranks_XN.expand(num_rows, -1)
        other.real_XN = self.real_XN & speculate_B[:, None]
        other.real_XN[:, 0] = True
        other._derive(self.ancestors_XNN.expand(num_rows, -1, -1))
        return other

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
        chain = cls.__new__(cls)
        chain.parents_XN = torch.arange(-1, length).clamp(min=0)[None]
        chain.ranks_XN = torch.zeros_like(chain.parents_XN)
        chain.real_XN = torch.ones_like(chain.parents_XN, dtype=torch.bool)
        chain._derive(torch.ones(1, length + 1, length + 1, dtype=torch.bool).tril())
        return chain

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
    present: set[Path] = {()}
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


def _ancestors(parents_XN: Tensor) -> Tensor:
    """Who is above whom [X, N, N], without host reads.

    With P the strictly lower matrix of the parent relation, the ancestors are P^0 + P^1 + ... = (I - P)^-1: one
    triangular solve. Chains, which prompts of thousands of tokens are, come with theirs.
    """
    num_nodes = parents_XN.shape[1]
    eye_NN = torch.eye(num_nodes, device=parents_XN.device)
    links_XNN = eye_NN.expand(len(parents_XN), -1, -1).clone().scatter_(2, parents_XN[..., None], -1.0)
    ones_XNN = eye_NN.expand_as(links_XNN)
    return torch.linalg.solve_triangular(links_XNN, ones_XNN, upper=False, unitriangular=True) > 0
