"""The drafter that guesses nothing: plain decoding is the same loop with an empty tree."""

from medusa_cli.contracts import Context, Draft
from medusa_cli.drafters.memory import NoMemory
from medusa_cli.trees.tree import TokenTree


class NoDrafter(NoMemory):
    """The fair baseline, and the switch that turns speculation off."""

    name = "none"
    size = 0

    def __init__(self) -> None:
        self.tree = TokenTree.empty()

    def propose(self, context: Context) -> Draft:
        """The roots alone."""
        return Draft(context.root_B[:, None], self.tree.to(context.root_B.device))
