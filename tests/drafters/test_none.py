"""The drafter that guesses nothing."""

import torch

from medusa_cli.contracts import Context
from medusa_cli.drafters.none import NoDrafter


def test_no_guess_is_made_and_every_root_is_there() -> None:
    context = Context([[1, 5], [7]], torch.tensor([5, 7]), torch.zeros(2, 4))
    drafter = NoDrafter()
    drafter.join(0, [[1], []], None)
    draft = drafter.propose(context)
    assert draft.tokens_BN.tolist() == [[5], [7]]
    assert draft.tree.num_nodes == 1
    assert draft.tree.max_depth == 0
