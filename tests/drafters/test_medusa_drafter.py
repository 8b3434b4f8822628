"""Medusa's draft: node (depth k + 1, rank r) holds head k's r-th best token."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from medusa_cli.contracts import Context
from medusa_cli.drafters.medusa import MedusaDrafter
from medusa_cli.errors import TreeError
from medusa_cli.trees.tree import TokenTree
from tests.fakes import SHAPES

HEADS, DRAFT_VOCAB, HIDDEN = 4, 6, 8
IDS = torch.tensor([3, 17, 40, 41, 8, 96])


class FakeHeads:
    """Linear heads over a draft vocabulary of six of the target's tokens."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(type="medusa", num_heads=HEADS, draft_vocab=DRAFT_VOCAB)
        self.weight_KWH = torch.randn(HEADS, DRAFT_VOCAB, HIDDEN)

    def inputs(self, hidden: Tensor, roots: Tensor) -> Tensor:
        return hidden

    def __call__(self, hidden: Tensor) -> Tensor:
        return torch.einsum("...h,kwh->...kw", hidden, self.weight_KWH)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return IDS[draft_ids]


def context_of(num_rows: int) -> Context:
    roots = list(range(50, 50 + num_rows))
    return Context([[1, root] for root in roots], torch.tensor(roots), torch.randn(num_rows, HIDDEN))


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_node_holds_its_head_s_choice_of_its_rank(num_rows: int) -> None:
    heads, context = FakeHeads(), context_of(num_rows)
    tree = SHAPES["wide"](1, torch.Generator())
    draft = MedusaDrafter(heads, tree).propose(context)
    assert draft.tokens_BN[:, 0].tolist() == context.root_B.tolist()
    assert draft.q_BNV is None
    order_BKW = heads(context.hidden_BH).argsort(dim=-1, descending=True)
    for row in range(num_rows):
        for node, path in enumerate(tree.paths(), start=1):
            wanted = IDS[order_BKW[row, len(path) - 1, path[-1]]]
            assert draft.tokens_BN[row, node] == wanted, path


def test_siblings_hold_distinct_tokens() -> None:
    tree = TokenTree.from_paths([[rank] for rank in range(DRAFT_VOCAB)])
    draft = MedusaDrafter(FakeHeads(), tree).propose(context_of(3))
    assert all(sorted(row) == sorted(IDS.tolist()) for row in draft.tokens_BN[:, 1:].tolist())


def test_only_tokens_of_the_draft_vocabulary_are_guessed() -> None:
    draft = MedusaDrafter(FakeHeads(), SHAPES["wide"](1, torch.Generator())).propose(context_of(40))
    assert set(draft.tokens_BN[:, 1:].flatten().tolist()) <= set(IDS.tolist())


def test_an_empty_tree_is_the_root_alone() -> None:
    context = context_of(2)
    assert MedusaDrafter(FakeHeads(), TokenTree.empty()).propose(context).tokens_BN.tolist() == [[50], [51]]


def test_a_draft_depends_on_nothing_but_the_context() -> None:
    drafter, context = MedusaDrafter(FakeHeads(), SHAPES["wide"](1, torch.Generator())), context_of(2)
    first = drafter.propose(context).tokens_BN
    drafter.propose(context_of(3))
    drafter.keep(context, None)
    assert torch.equal(drafter.propose(context).tokens_BN, first)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([[0], [0, 0], [0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0, 0]], r"path \[0, 0, 0, 0, 0\] needs head 5; 4 present"),
        ([[0], [6]], r"path \[6\] asks for rank 6; a head offers ranks 0 to 5"),
    ],
)
def test_a_tree_that_asks_for_more_than_the_heads_offer_is_refused(paths: list[list[int]], message: str) -> None:
    # Medusa#31, #63, #81: an index error in the middle of decoding
    with pytest.raises(TreeError, match=message):
        MedusaDrafter(FakeHeads(), TokenTree.from_paths(paths))
