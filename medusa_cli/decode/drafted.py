"""What was guessed in a step for one row, for who asks to see it: a reference until then, read by `verified`."""

from collections.abc import Sequence
from dataclasses import dataclass

from medusa_cli.contracts import Draft


@dataclass(frozen=True)
class Verified:
    """One row's tree as the target checked it, without padding.

    parents   the node that each hangs under, earlier in the list; -1 for node 0, the root
    ids       their tokens; the root's was decided before
    kept      nodes of the kept path, from the root down: all but the root became text
    """

    parents: list[int]
    ids: list[int]
    kept: list[int]


@dataclass(frozen=True)
class Drafted:
    """A step's draft, a row's place in it, and the nodes that the row kept. It holds until the next step."""

    draft: Draft
    place: int
    kept: Sequence[int]

    def verified(self) -> Verified:
        """The row's tree; waits for the device."""
        draft = self.draft.of_rows([self.place])
        tree = draft.tree
        parents, real, ids = tree.parents_XN[0].tolist(), tree.real_XN[0].tolist(), draft.tokens_BN[0].tolist()
        nodes = [node for node, is_real in enumerate(real) if is_real]
        number = {node: index for index, node in enumerate(nodes)}
        return Verified(
            [number[parents[node]] if node else -1 for node in nodes],
            [ids[node] for node in nodes],
            [number[node] for node in self.kept],
        )
