"""Forwards: the ways a model's forward over tree nodes can be run, asked in order which of them takes the work.

Shape letters: B rows, N tree nodes, W wanted nodes.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from medusa_cli.contracts import Seen
from medusa_cli.model.cache import TreeCache
from medusa_cli.model.rotary import TableSpans
from medusa_cli.trees.tree import TokenTree


@dataclass(frozen=True)
class Work:
    """What one forward reads: the nodes of a tree under rows of a cache, on the device of the inputs.

    wanted_BW   nodes whose hidden states and logits are asked for; None: all of them
    spans       which rotary tables turn the nodes; None where the model has but one
    taps        inner layers whose states are wanted at every node, numbered as in model/taps.py
    """

    tokens_BN: Tensor
    tree: TokenTree
    cache: TreeCache
    rows: slice
    wanted_BW: Tensor | None
    spans: TableSpans | None
    taps: tuple[int, ...] = ()

    @property
    def is_plain_step(self) -> bool:
        """Whether it is what every step does: all nodes, under one rotary table."""
        return self.wanted_BW is None and self.spans is None


class Forward(Protocol):
    """One way to run a model over tree nodes. It writes keys and values and commits nothing."""

    def takes(self, work: Work) -> bool:
        """Whether it can run this."""
        ...

    def __call__(self, work: Work) -> Seen:
        """Run what it takes."""
        ...

    def lend_to(self, cache: TreeCache) -> None:
        """Let a new cache keep its keys and values where this forward wants them."""
        ...

    def columns_for(self, longest: int, num_nodes: int) -> int:
        """Cache columns that it holds for so many committed tokens and a draft under them; 0: no more than asked."""
        ...

    def release(self) -> None:
        """Give back what is held for texts to come."""
        ...


class HoldsNothing:
    """For forwards that bring no memory of their own for keys and values."""

    def lend_to(self, cache: TreeCache) -> None:
        """Nothing to lend."""

    def columns_for(self, longest: int, num_nodes: int) -> int:
        """As many as asked for."""
        return 0

    def release(self) -> None:
        """Nothing to give back."""
