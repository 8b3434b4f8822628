"""Speculation switched off for some rows: their trees are the root alone, the other rows keep theirs.

Shape letters: B rows.
"""

from dataclasses import replace

import torch

from medusa_cli.contracts import Context, Draft, Drafter
from medusa_cli.drafters.memory import InnerMemory
from medusa_cli.trees.tree import TokenTree


class SilentDrafter(InnerMemory):
    """Guesses nothing, and goes on remembering for one that does."""

    name, size = "none", 0

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner

    def propose(self, context: Context) -> Draft:
        """The roots alone."""
        return Draft(context.root_B[:, None], TokenTree.empty())


class SwitchedDrafter(InnerMemory):
    """A drafter whose guesses reach only the rows that want some (`Context.speculate`)."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner

    @property
    def name(self) -> str:
        """The drafter's own."""
        return self.inner.name

    @property
    def size(self) -> int:
        """Nodes under the root, at most."""
        return self.inner.size

    def propose(self, context: Context) -> Draft:
        """The drafter's trees, roots alone where no guesses are wanted; it isn't asked when nobody wants any."""
        if context.speculate is None:
            return self.inner.propose(context)
        if not any(context.speculate):
            return SilentDrafter(self.inner).propose(context)
        draft = self.inner.propose(context)
        wanted_B = torch.tensor(context.speculate, device=draft.tree.parents_XN.device)
        return replace(draft, tree=draft.tree.only_in(wanted_B))
