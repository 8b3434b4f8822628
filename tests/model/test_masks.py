"""Masks and positions of trees, against a slow reading of their definition."""

import random

import pytest
import torch

from medusa_cli.model.cache import Place, TreeCache
from medusa_cli.model.masks import positions, tree_masks
from medusa_cli.trees.tree import TokenTree

CPU = torch.device("cpu")
LOWEST = torch.finfo(torch.float32).min


def random_parents(num_nodes: int, rng: random.Random) -> list[int]:
    return [0, *(rng.randrange(node) for node in range(1, num_nodes))]


def tree_of(rows: list[list[int]]) -> TokenTree:
    parents_XN = torch.tensor(rows)
    return TokenTree(parents_XN, torch.zeros_like(parents_XN))


def placed(lengths: list[int], num_nodes: int) -> Place:
    cache = TreeCache(0, len(lengths), 0)
    cache.commit(slice(0, len(lengths)), lengths)
    return cache.place(slice(0, len(lengths)), num_nodes, CPU)


def line_up(node: int, parents: list[int]) -> list[int]:
    """The node and all above it, the root last."""
    line = [node]
    while line[-1]:
        line.append(parents[line[-1]])
    return line


def visible(parents: list[int], length: int, used: int, window: int | None) -> list[list[bool]]:
    """By definition: committed columns and the node's line, as far as they are less than `window` positions back."""
    rows = []
    for node in range(len(parents)):
        line = line_up(node, parents)
        position = length + len(line) - 1
        at = {column: column for column in range(length)}
        at |= {length + above: length + len(line_up(above, parents)) - 1 for above in line}
        near = {column for column, place in at.items() if window is None or position - place < window}
        rows.append([column in near for column in range(used)])
    return rows


@pytest.mark.parametrize("window", [None, 1, 3, 8])
@pytest.mark.parametrize("lengths", [[7], [7, 7, 7], [2, 9, 5], [0, 4]])
@pytest.mark.parametrize("seed", range(10))
def test_a_node_sees_the_text_the_nodes_above_and_itself(seed: int, lengths: list[int], window: int | None) -> None:
    # Medusa#88, on random trees: one for all rows, and one each
    rng = random.Random(seed)
    num_nodes = rng.randrange(1, 12)
    each = [random_parents(num_nodes, rng) for _ in lengths]
    place = placed(lengths, num_nodes)
    for parents in (each[:1], each):
        mask = tree_masks(tree_of(parents), place, {"kind": window}, torch.float32)["kind"]
        assert mask.dim() == 4
        seen = (mask == 0).expand(len(lengths), -1, -1, -1)[:, 0]
        for row, length in enumerate(lengths):
            wanted = visible(parents[row % len(parents)], length, max(lengths) + num_nodes, window)
            assert seen[row].tolist() == wanted


@pytest.mark.parametrize("seed", range(10))
def test_a_position_is_the_row_s_length_and_the_node_s_depth(seed: int) -> None:
    rng = random.Random(seed)
    lengths, num_nodes = [3, 0, 8], rng.randrange(1, 12)
    parents = [random_parents(num_nodes, rng) for _ in lengths]
    wanted = [
        [length + len(line_up(node, line)) - 1 for node in range(num_nodes)]
        for length, line in zip(lengths, parents, strict=True)
    ]
    assert positions(tree_of(parents), placed(lengths, num_nodes)).tolist() == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masks_are_added_in_the_model_s_dtype(dtype: torch.dtype) -> None:
    # transformers#29525: eager attention adds a boolean mask as ones and zeros
    mask = tree_masks(TokenTree.chain(3), placed([2], 4), {"kind": None}, dtype)["kind"]
    assert mask.dtype == dtype
    assert set(mask.unique().tolist()) == {0.0, torch.finfo(dtype).min}


def test_every_kind_of_layer_has_its_own_mask() -> None:
    masks = tree_masks(TokenTree.chain(0), placed([6], 1), {"full": None, "sliding": 3}, torch.float32)
    assert (masks["full"] == 0)[0, 0, 0].tolist() == [True] * 7
    assert (masks["sliding"] == 0)[0, 0, 0].tolist() == [False] * 4 + [True] * 3


def test_siblings_share_a_position_and_do_not_see_each_other() -> None:
    tree = TokenTree.from_paths([[0], [1], [0, 0]])
    mask = tree_masks(tree, placed([2], 4), {"kind": None}, torch.float32)["kind"][0, 0]
    assert positions(tree, placed([2], 4)).tolist() == [[2, 3, 3, 4]]
    assert (mask == 0).long().tolist() == [
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 0, 1, 0],
        [1, 1, 1, 1, 0, 1],
    ]


def test_padding_nodes_are_seen_by_no_other_node() -> None:
    tree = TokenTree(torch.tensor([[0, 0, 0, 1]]), torch.zeros(1, 4).long(), torch.tensor([[True, True, False, True]]))
    mask = tree_masks(tree, placed([1], 4), {"kind": None}, torch.float32)["kind"][0, 0]
    assert (mask[:, 1 + 2] == 0).tolist() == [False, False, True, False]
