"""The best static tree for a budget, and the budget that pays."""

import random
from itertools import product

import pytest

from medusa_cli.errors import TreeError
from medusa_cli.trees.build import (
    StepCost,
    best_tree,
    choose_size,
    expected_tokens,
    gain_curve,
    path_probability,
)
from medusa_cli.trees.tree import Path, TokenTree

# Top-1 accuracies of published Llama-3.1-70B heads (TensorRT-LLM#2506); the lower ranks are made up.
ACCURACY_KR = [[0.68, 0.12, 0.05, 0.03], [0.33, 0.13, 0.07, 0.04], [0.18, 0.09, 0.06, 0.04]]
FLAT = {1: 0.05, 64: 0.05}
STEEP = {nodes: 0.05 * nodes for nodes in (1, 2, 4, 8, 16, 32, 64)}


def _best_sum_by_brute_force(accuracy_KR: list[list[float]], size: int) -> float:
    """The largest sum of path probabilities over all trees of at most `size` nodes."""
    heads, ranks = len(accuracy_KR), len(accuracy_KR[0])
    paths = [path for depth in range(1, heads + 1) for path in product(range(ranks), repeat=depth)]
    worth = [path_probability(path, accuracy_KR) for path in paths]
    parent = {n: paths.index(path[:-1]) for n, path in enumerate(paths) if len(path) > 1}
    best = 0.0
    for chosen in range(1 << len(paths)):
        nodes = [n for n in range(len(paths)) if chosen >> n & 1]
        if len(nodes) <= size and all(chosen >> parent[n] & 1 for n in nodes if n in parent):
            best = max(best, sum(worth[n] for n in nodes))
    return best


@pytest.mark.parametrize(("heads", "ranks"), [(1, 4), (2, 3), (3, 2)])
@pytest.mark.parametrize("seed", range(2))
def test_no_tree_of_a_size_beats_the_greedy_one(heads: int, ranks: int, seed: int) -> None:
    rng = random.Random(seed)
    accuracy_KR = [[rng.random() / ranks for _ in range(ranks)] for _ in range(heads)]
    for size in (1, 3, 5):
        tree = best_tree(accuracy_KR, size)
        gained = expected_tokens(tree, accuracy_KR) - 1
        assert gained == pytest.approx(_best_sum_by_brute_force(accuracy_KR, size))


def test_the_best_tree_contains_the_best_smaller_ones() -> None:
    smaller: set[Path] = set()
    for size in range(40):
        paths = set(best_tree(ACCURACY_KR, size).paths())
        assert len(paths) == size
        assert smaller < paths or size == 0
        smaller = paths


def test_ranks_are_taken_by_accuracy_and_not_by_number() -> None:
    assert best_tree([[0.1, 0.5, 0.2]], 2).paths() == [(1,), (2,)]


def test_a_node_that_is_never_right_is_never_added() -> None:
    assert best_tree([[0.5, 0.0], [0.0, 0.0]], 10).paths() == [(0,)]
    assert best_tree([], 10).paths() == []


def test_a_chain_gains_the_sum_of_its_products() -> None:
    assert expected_tokens(TokenTree.chain(3), ACCURACY_KR) == pytest.approx(
        1 + 0.68 + 0.68 * 0.33 + 0.68 * 0.33 * 0.18
    )
    assert expected_tokens(TokenTree.empty(), ACCURACY_KR) == 1.0


def test_expected_tokens_refuses_a_tree_deeper_than_the_heads() -> None:
    with pytest.raises(TreeError, match=r"path \[0, 0, 0, 0\] needs head 4; 3 present"):
        expected_tokens(TokenTree.chain(5), ACCURACY_KR)


def test_the_gain_curve_is_what_the_best_trees_gain_and_never_falls() -> None:
    gains = gain_curve(ACCURACY_KR, 100)
    assert len(gains) == 101
    assert gains == sorted(gains)
    for size in (0, 1, 7, 63, 100):
        assert gains[size] == pytest.approx(expected_tokens(best_tree(ACCURACY_KR, size), ACCURACY_KR))


def test_on_a_flat_cost_a_bigger_budget_gives_a_bigger_tree() -> None:
    gains = gain_curve(ACCURACY_KR, 63)
    choices = [choose_size(gains, FLAT, budget) for budget in range(64)]
    assert [choice.size for choice in choices] == list(range(64))
    expected = [choice.expected_tokens for choice in choices]
    assert expected == sorted(expected)
    assert choices[63].cost_ratio == 1.0
    assert choices[63].speedup == pytest.approx(gains[63])


def test_a_steeper_cost_gives_a_smaller_tree_down_to_none() -> None:
    gains = gain_curve(ACCURACY_KR, 63)
    costs = [{1: 1.0, 64: 1.0 + 63 * slope} for slope in (0.0, 0.005, 0.02, 0.1, 0.3, 0.6, 0.7, 2.0)]
    sizes = [choose_size(gains, cost, 63).size for cost in costs]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 63
    assert sizes[-1] == 0
    assert len(set(sizes)) > 4
    none = choose_size(gains, STEEP, 63)
    assert (none.size, none.expected_tokens, none.cost_ratio, none.speedup) == (0, 1.0, 1.0, 1.0)


def test_heads_that_are_always_wrong_get_no_tree() -> None:
    assert choose_size(gain_curve([[0.0] * 4] * 3, 63), FLAT, 63).size == 0


def test_costs_between_measured_points_lie_on_a_line_and_go_on_past_the_last() -> None:
    cost = StepCost({1: 1.0, 9: 2.0, 17: 4.0})
    assert [cost.seconds(nodes) for nodes in (1, 5, 9, 13, 17, 21)] == [1.0, 1.5, 2.0, 3.0, 4.0, 5.0]
    assert cost.ratio(17) == 4.0
    assert StepCost({1: 2.0}).ratio(64) == 1.0


def test_noisy_costs_are_pooled_so_that_more_nodes_are_never_cheaper() -> None:
    cost = StepCost({1: 1.2, 4: 1.0, 16: 1.5, 32: 1.3, 64: 1.7})
    assert [cost.seconds(nodes) for nodes in (1, 4, 16, 32, 64)] == pytest.approx([1.1, 1.1, 1.4, 1.4, 1.7])


@pytest.mark.parametrize("points", [{}, {2: 1.0}, {1: 0.0}, {1: float("nan")}, {0: 1.0, 1: 1.0}])
def test_costs_that_are_no_curve_are_refused(points: dict[int, float]) -> None:
    with pytest.raises(TreeError, match="are no curve"):
        StepCost(points)


def test_a_gain_within_the_noise_of_measured_costs_is_no_promise() -> None:
    assert choose_size([1.0, 1.02], {1: 1.0, 2: 1.0}, 1).size == 0
    assert choose_size([1.0, 1.04], {1: 1.0, 2: 1.0}, 1).size == 1
