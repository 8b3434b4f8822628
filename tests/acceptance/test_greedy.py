"""Greedy acceptance: the target's best tokens, and nothing else, are kept."""

import torch
from torch import Tensor

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.contracts import Draft
from medusa_cli.trees.tree import TokenTree

VOCAB = 7


def logits_for(best_BN: list[list[int]]) -> Tensor:
    """Random logits whose best token at each node is the given one."""
    logits_BNV = torch.rand(len(best_BN), len(best_BN[0]), VOCAB)
    return logits_BNV.scatter_(2, torch.tensor(best_BN)[..., None], 2.0)


def test_the_first_root_is_the_best_token() -> None:
    assert Greedy().first(logits_for([[3, 5, 0]])[0]).tolist() == [3, 5, 0]


def test_a_chain_is_kept_down_to_the_first_wrong_guess() -> None:
    draft = Draft(torch.tensor([[6, 1, 2, 3]]).expand(4, -1), TokenTree.chain(3))
    best = [[1, 2, 3, 4], [1, 2, 0, 4], [1, 0, 3, 4], [0, 2, 3, 4]]
    verdict = Greedy().accept(draft, logits_for(best))
    assert verdict.kept_B.tolist() == [4, 3, 2, 1]
    assert verdict.next_B.tolist() == [4, 0, 0, 0]


def test_every_row_keeps_its_own_path_of_one_tree() -> None:
    # nodes 1 and 2 under the root, 3 under 1, 4 under 2
    tree = TokenTree.from_paths([[0], [1], [0, 0], [1, 0]])
    draft = Draft(torch.tensor([[6, 1, 2, 3, 4]] * 3), tree)
    verdict = Greedy().accept(draft, logits_for([[1, 3, 0, 5, 5], [2, 3, 4, 5, 6], [5, 3, 4, 5, 6]]))
    assert verdict.path_BD.tolist() == [[0, 1, 3], [0, 2, 4], [0, -1, -1]]
    assert verdict.next_B.tolist() == [5, 6, 5]


def test_greedy_says_that_it_is_exact() -> None:
    assert Greedy().exact
