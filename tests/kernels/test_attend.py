"""Attention in one call: the numbers of the plain formula, wherever nodes, rows and windows put the columns."""

import pytest
import torch

from medusa_cli.kernels.attend import Nodes, attend, can_attend
from medusa_cli.trees.tree import TokenTree

pytestmark = pytest.mark.skipif(not can_attend(), reason="no C++ compiler")

TREES = {
    "root": TokenTree.empty(),
    "chain": TokenTree.chain(4),
    "wide": TokenTree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]),
}


def by_formula(query, keys, values, lengths, tree: TokenTree, window: int | None, scale: float) -> torch.Tensor:
    """[B, N, Q, E] in double precision, one row, head and node at a time."""
    num_rows, query_heads, num_nodes, _ = query.shape
    share = query_heads // keys.shape[1]
    out = torch.zeros(num_rows, num_nodes, query_heads, values.shape[-1], dtype=torch.double)
    for b, length in enumerate(lengths):
        position = torch.cat([torch.arange(length), length + tree.depths_XN[0]])
        for n in range(num_nodes):
            seen = torch.cat([torch.ones(length, dtype=torch.bool), tree.ancestors_XNN[0, n]])
            if window is not None:
                seen &= length + tree.depths_XN[0, n] - position < window
            for q in range(query_heads):
                scores = keys[b, q // share, : length + num_nodes].double() @ query[b, q, n].double() * scale
                weights = scores.masked_fill(~seen, -torch.inf).softmax(0)
                out[b, n, q] = weights @ values[b, q // share, : length + num_nodes].double()
    return out


@pytest.mark.parametrize("lengths", [[0], [5], [130], [3, 40, 17]])
@pytest.mark.parametrize("window", [None, 1, 4, 32])
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize(("width", "value_width"), [(64, 64), (8, 8), (20, 12)])
def test_the_numbers_are_those_of_the_formula(
    lengths: list[int], window: int | None, name: str, width: int, value_width: int
) -> None:
    tree, rng = TREES[name], torch.Generator().manual_seed(5)
    num_rows, num_nodes, columns = len(lengths), tree.num_nodes, max(lengths) + tree.num_nodes + 3

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    query = random(num_rows, num_nodes, 6, width).transpose(1, 2)  # as a projection leaves it
    key, value = random(num_rows, num_nodes, 2, width).transpose(1, 2), random(num_rows, 2, num_nodes, value_width)
    keys, values = random(num_rows + 1, 2, columns, width), random(num_rows + 1, 2, columns, value_width)
    untouched = keys.clone()
    nodes = Nodes(torch.tensor(lengths), tree.ancestors_XNN, tree.depths_XN)
    found = attend(query, key, value, keys[:num_rows], values[:num_rows], nodes, window, 0.3)
    for row, length in enumerate(lengths):
        assert torch.equal(keys[row, :, length : length + num_nodes], key[row])
        assert torch.equal(values[row, :, length : length + num_nodes], value[row])
        assert torch.equal(keys[row, :, :length], untouched[row, :, :length])
    assert torch.equal(keys[-1], untouched[-1])
    wanted = by_formula(query, keys, values, lengths, tree, window, 0.3)
    torch.testing.assert_close(found.double(), wanted, atol=2e-6, rtol=2e-6)


def test_each_row_may_have_a_tree_of_its_own() -> None:
    one, other = TREES["chain"], TokenTree.from_paths([[0], [1], [2], [3]])
    both = TokenTree(torch.cat([one.parents_XN, other.parents_XN]), torch.cat([one.ranks_XN, other.ranks_XN]))
    rng = torch.Generator().manual_seed(6)
    query, key, value = (torch.randn(2, 3, 5, 16, generator=rng) for _ in range(3))
    keys, values = torch.zeros(2, 3, 16, 16), torch.zeros(2, 3, 16, 16)
    nodes = Nodes(torch.tensor([4, 9]), both.ancestors_XNN, both.depths_XN)
    found = attend(query, key, value, keys, values, nodes, None, 1.0)
    for row, tree in enumerate((one, other)):
        rows = slice(row, row + 1)
        wanted = by_formula(query[rows], keys[rows], values[rows], [[4], [9]][row], tree, None, 1.0)
        torch.testing.assert_close(found[rows].double(), wanted, atol=2e-6, rtol=2e-6)


def test_scores_far_apart_and_far_from_zero_keep_their_shares() -> None:
    query = torch.full((1, 1, 1, 8), 30.0)
    keys, values = torch.zeros(1, 1, 8, 8), torch.arange(8.0).repeat_interleave(8).view(1, 1, 8, 8).clone()
    keys[0, 0, :4] = torch.tensor([1.0, 0.999, -1.0, 0.9])[:, None]
    nodes = Nodes(torch.tensor([4]), TREES["root"].ancestors_XNN, TREES["root"].depths_XN)
    found = attend(query, torch.full((1, 1, 1, 8), 1.001), values[:, :, 4:5], keys, values, nodes, None, 1.0)
    wanted = by_formula(query, keys, values, [4], TREES["root"], None, 1.0)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


def test_nodes_may_see_each_other_whatever_their_depths() -> None:
    """A block whose places all see each other is no tree: the mask says who is seen, the depths where they stand."""
    rng = torch.Generator().manual_seed(7)
    query, key, value = (torch.randn(1, 3, 5, 16, generator=rng) for _ in range(3))
    keys, values = torch.randn(1, 3, 32, 16, generator=rng), torch.randn(1, 3, 32, 16, generator=rng)
    chain = TokenTree.chain(4)
    for mask_NN in (torch.ones(5, 5, dtype=torch.bool), torch.rand(5, 5, generator=rng) < 0.6):
        mask_NN.fill_diagonal_(True)
        for depths_XN in (chain.depths_XN, torch.zeros_like(chain.depths_XN), torch.tensor([[0, 3, 1, 3, 2]])):
            nodes = Nodes(torch.tensor([9]), mask_NN[None], depths_XN)
            found = attend(query, key, value, keys, values, nodes, None, 0.3)
            everything = torch.cat([torch.ones(5, 9, dtype=torch.bool), mask_NN], dim=1)
            scores = query[0].double() @ keys[0, :, :14].double().transpose(1, 2) * 0.3
            wanted = scores.masked_fill(~everything, -torch.inf).softmax(-1) @ values[0, :, :14].double()
            torch.testing.assert_close(found[0].double(), wanted.transpose(0, 1), atol=2e-6, rtol=2e-6)
