"""Guesses poured together: no path twice, parents first, the likeliest nodes."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_cli.drafters.trie import Picked, Trie, draft_of

CPU = torch.device("cpu")


def test_a_path_that_two_sources_guess_is_one_path_of_the_higher_chance() -> None:
    trie = Trie(7)
    trie.add_path([1, 2], [0.5, 0.2])
    trie.add_path([1, 3], [0.6, 0.1])
    assert trie.tokens == [7, 1, 2, 3]
    assert trie.chances == [1.0, 0.6, 0.2, 0.1]
    assert trie.likeliest(2) == [1, 2]


def test_a_child_is_never_likelier_than_its_parent() -> None:
    trie = Trie(7)
    trie.add_path([1, 2], [0.3, 0.9])
    assert trie.chances == [1.0, 0.3, 0.3]
    assert trie.likeliest(5) == [1, 2]


def test_rows_are_padded_to_the_largest_and_siblings_ranked_in_order() -> None:
    wide, narrow = Trie(7), Trie(8)
    wide.add_path([1], [0.5])
    wide.add_path([2, 3], [0.4, 0.3])
    narrow.add_path([5], [0.9])
    draft = draft_of([Picked(wide, wide.likeliest(9)), Picked(narrow, narrow.likeliest(9))], CPU)
    assert draft.tokens_BN.tolist() == [[7, 1, 2, 3], [8, 5, 0, 0]]
    assert draft.tree.parents_XN.tolist() == [[0, 0, 0, 2], [0, 0, 0, 0]]
    assert draft.tree.ranks_XN.tolist() == [[0, 0, 1, 0], [0, 0, 0, 0]]
    assert draft.tree.real_XN.tolist() == [[True] * 4, [True, True, False, False]]


def test_nothing_guessed_is_the_root_alone() -> None:
    draft = draft_of([Picked(Trie(7), [])], CPU)
    assert draft.tokens_BN.tolist() == [[7]]
    assert draft.tree.num_nodes == 1


PATHS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=8)


@given(PATHS, st.lists(st.floats(0, 1), min_size=4, max_size=4), st.integers(0, 9))
def test_any_guesses_make_a_tree_without_twins(paths: list[list[int]], chances: list[float], size: int) -> None:
    trie = Trie(9)
    for path in paths:
        trie.add_path(path, chances[: len(path)])
    nodes = trie.likeliest(size)
    draft = draft_of([Picked(trie, nodes)], CPU)
    parents, tokens = draft.tree.parents_XN[0].tolist(), draft.tokens_BN[0].tolist()
    assert all(parent < node for node, parent in enumerate(parents) if node)
    assert len(set(zip(parents[1:], tokens[1:], strict=True))) == len(nodes)
    assert len(nodes) == min(size, len(trie.tokens) - 1)
