"""Trees from the heads' confidence, row by row."""

import heapq

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from medusa_cli.trees.dynamic import dynamic_tree
from medusa_cli.trees.tree import Path


def _logp(rows: int, heads: int, ranks: int, seed: int = 0, sharpness: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, heads, 50, generator=generator) * sharpness
    return logits.log_softmax(-1).topk(ranks).values


def _best_first(logp_KR: list[list[float]], size: int) -> list[Path]:
    """The same tree by a heap, one node after the other."""
    heap = [(-logp_KR[0][0], 1, (0,))]
    taken: list[Path] = []
    while heap and len(taken) < size:
        negative, depth, path = heapq.heappop(heap)
        if negative == float("inf"):
            break
        taken.append(path)
        above = negative + logp_KR[depth - 1][path[-1]]
        if path[-1] + 1 < len(logp_KR[0]):
            heapq.heappush(heap, (above - logp_KR[depth - 1][path[-1] + 1], depth, (*path[:-1], path[-1] + 1)))
        if depth < len(logp_KR):
            heapq.heappush(heap, (negative - logp_KR[depth][0], depth + 1, (*path, 0)))
    return taken


@pytest.mark.parametrize(("heads", "ranks", "size"), [(4, 10, 32), (3, 4, 16), (1, 8, 5), (5, 3, 64), (2, 10, 1)])
def test_each_row_gets_the_tree_that_best_first_search_finds(heads: int, ranks: int, size: int) -> None:
    logp_BKR = _logp(5, heads, ranks).double().float()
    tree = dynamic_tree(logp_BKR, size)
    for row, logp_KR in enumerate(logp_BKR.tolist()):
        assert set(tree.paths(row)) == set(_best_first(logp_KR, size))


@given(
    seed=st.integers(0, 10_000),
    heads=st.integers(1, 5),
    ranks=st.integers(1, 6),
    size=st.integers(0, 40),
    sharpness=st.sampled_from([0.0, 0.5, 3.0, 60.0]),
)
@settings(max_examples=60, deadline=None)
def test_rows_are_whole_trees_of_distinct_nodes(seed: int, heads: int, ranks: int, size: int, sharpness: float) -> None:
    tree = dynamic_tree(_logp(3, heads, ranks, seed, sharpness), size)
    assert tree.num_nodes == size + 1
    assert tree.real_XN[:, 0].all()
    possible = sum(ranks**depth for depth in range(1, heads + 1))
    for row in range(3):
        parents = tree.parents_XN[row].tolist()
        assert all(parent < node for node, parent in enumerate(parents) if node)
        paths = tree.paths(row)
        assert len(paths) == min(size, possible)
        assert len(set(paths)) == len(paths)
        assert all(path[:-1] == () or path[:-1] in paths for path in paths)


def test_a_sure_row_gets_a_deep_tree_and_an_unsure_one_a_wide_tree() -> None:
    sure_KR = torch.tensor([[0.97, 0.01, 0.005, 0.001]] * 4).log()
    unsure_KR = torch.tensor([[0.12, 0.11, 0.10, 0.09]] * 4).log()
    tree = dynamic_tree(torch.stack([sure_KR, unsure_KR]), 4)
    assert tree.paths(0) == [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]
    assert tree.paths(1) == [(0,), (1,), (2,), (3,)]


def test_certain_guesses_keep_parents_before_children() -> None:
    logp_BKR = torch.tensor([[[0.0, -torch.inf]] * 4])
    tree = dynamic_tree(logp_BKR, 6)
    assert tree.paths(0) == [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]
    assert tree.parents_XN[0].tolist() == [0, 0, 1, 2, 3, 0, 0]
    assert tree.real_XN[0].tolist() == [True] * 5 + [False] * 2


def test_tokens_that_must_not_be_drafted_are_padding() -> None:
    logp_BKR = torch.tensor([[[-0.5, -torch.inf, -torch.inf]] * 2, [[-1.0, -1.2, -1.4]] * 2])
    tree = dynamic_tree(logp_BKR, 8)
    assert tree.real_XN.sum(-1).tolist() == [3, 9]
    assert tree.ranks_XN[0][~tree.real_XN[0]].eq(0).all()
    assert tree.depths_XN[0].tolist() == [0, 1, 2, 1, 1, 1, 1, 1, 1]


def test_a_size_beyond_all_paths_is_filled_with_padding() -> None:
    tree = dynamic_tree(_logp(2, 2, 2), 10)
    assert tree.num_nodes == 11
    assert tree.real_XN.sum(-1).tolist() == [7, 7]


def test_half_precision_confidence_gives_a_whole_tree() -> None:
    tree = dynamic_tree(_logp(4, 4, 10).bfloat16(), 32)
    for row in range(4):
        paths = tree.paths(row)
        assert len(set(paths)) == 32
        assert all(path[:-1] == () or path[:-1] in paths for path in paths)
