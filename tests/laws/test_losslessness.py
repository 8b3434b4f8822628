"""Law 2 on a model: texts sampled with guesses come with the model's own chances.

The tests of the rule itself are in tests/acceptance, on logits made by hand.
"""

import pytest
import torch
from torch import Tensor

from medusa_cli.acceptance.lossless import Lossless
from medusa_cli.contracts import Context, Draft
from medusa_cli.decode.loop import Parts, collect
from medusa_cli.decode.rows import Limits
from medusa_cli.trees.tree import TokenTree
from tests.fakes import VOCAB, follows, prompt_of, target_of, tiny_model

PROMPT = prompt_of(6)
RULE = Lossless(temperature=4.0, top_p=1.0, top_k=3)
DRAWS = 3000


def chances(ids: list[int]) -> Tensor:
    """What the rule makes of the library's plain forward: the law of the token after these."""
    return RULE.probabilities(tiny_model("llama")(torch.tensor([ids])).logits[0, -1])


class LikelyDrafter:
    """Puts the two likeliest followers of each root under it, and the likeliest one of the first under that."""

    def __init__(self) -> None:
        self.tree = TokenTree.from_paths([[0], [1], [0, 0]])
        self.following: dict[int, list[int]] = {}
        for root in chances(PROMPT).nonzero().flatten().tolist():
            best = chances([*PROMPT, root]).topk(2).indices.tolist()
            self.following[root] = [*best, int(chances([*PROMPT, root, best[0]]).argmax())]

    def start(self, context: Context) -> None:
        pass

    def propose(self, context: Context) -> Draft:
        nothing = [0, 0, 0]
        tokens = [
            [ids[-1], *(self.following[ids[-1]] if len(ids) == len(PROMPT) + 1 else nothing)] for ids in context.tokens
        ]
        return Draft(torch.tensor(tokens), self.tree)


@pytest.mark.parametrize("seed", [0, 1])
def test_every_text_of_three_tokens_comes_with_its_own_chance(seed: int) -> None:
    parts = Parts(target_of(tiny_model("llama")), LikelyDrafter(), RULE, seed=seed)
    found = collect(parts, [PROMPT] * DRAWS, Limits(3), max_rows=500)
    assert {each.num_steps for each in found} == {1, 2}, "some guesses are right and some are wrong"
    law = torch.zeros(VOCAB, VOCAB, VOCAB)
    for first in chances(PROMPT).nonzero().flatten().tolist():
        for second in chances([*PROMPT, first]).nonzero().flatten().tolist():
            pair = chances(PROMPT)[first] * chances([*PROMPT, first])[second]
            law[first, second] = pair * chances([*PROMPT, first, second])
    texts_M3 = torch.tensor([each.token_ids for each in found])
    assert follows((texts_M3 * torch.tensor([VOCAB**2, VOCAB, 1])).sum(-1), law.flatten())
