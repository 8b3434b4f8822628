"""The tree fitted to accuracies and costs, and the measured cost of a step."""

import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from medusa_cli.drafters.none import NoDrafter
from medusa_cli.model.costs import by_nodes
from medusa_cli.pipeline import tree_fit
from medusa_cli.train.dynamic_replay import HeadBeliefs
from medusa_cli.train.measure import PathCounts
from medusa_cli.trees.build import Choice
from medusa_cli.trees.dynamic import DynamicShape
from tests.tiny_models import target_of, tiny_model

PATHS = PathCounts(10, Counter({(0,): 6, (1,): 3, (0, 0): 4, (0, 1): 1}))
FLAT = {1: 1.0, 8: 1.0}
STEEP = {1: 1.0, 2: 3.0, 8: 9.0}


def test_a_flat_cost_takes_every_path_that_was_ever_right() -> None:
    tree, choice = tree_fit._choose(PATHS, FLAT, None, largest=7)
    assert {tuple(path) for path in tree.paths()} == set(PATHS.counts)
    assert choice.expected_tokens == pytest.approx(2.4)
    assert choice.speedup == pytest.approx(2.4)


def test_a_steep_cost_takes_none() -> None:
    tree, choice = tree_fit._choose(PATHS, STEEP, None, largest=7)
    assert (tree.num_nodes, choice.size, choice.speedup) == (1, 0, 1.0)


def test_a_size_that_is_asked_for_is_kept_and_its_loss_is_told() -> None:
    tree, choice = tree_fit._choose(PATHS, STEEP, 2, largest=7)
    assert sorted(map(tuple, tree.paths())) == [(0,), (0, 0)]
    assert choice.expected_tokens == pytest.approx(2.0)
    assert choice.speedup < 1
    assert tree_fit._choose(PATHS, FLAT, 50, largest=50)[1].size == 4


def test_the_cost_is_measured_for_every_size_that_fits_and_pays_for_the_drafter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.set_num_threads(1)
    target = target_of(tiny_model("llama"))
    ticks = iter(range(10_000))
    monkeypatch.setattr(by_nodes, "now", lambda device: float(next(ticks)))
    asked = []

    class Counting(NoDrafter):
        def propose(self, context):
            asked.append(context.root_B.shape)
            return super().propose(context)

    costs = by_nodes.measure(target, range(1, 9), context=16, rounds=2, patience_s=math.inf, propose=Counting().propose)
    assert costs.seconds == dict.fromkeys(range(1, 9), 1.0)
    assert len(asked) == 3 * 7


def test_a_model_of_few_positions_is_measured_with_fewer_tokens_before(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(tiny_model("gpt2"))
    lengths = []
    prefill = target.prefill
    monkeypatch.setattr(
        target, "prefill", lambda prompts, cache: lengths.append(len(prompts[0])) or prefill(prompts, cache)
    )
    by_nodes.measure(target, (1, 64), context=256, rounds=1)
    assert lengths == [96 - 64]


def test_a_folder_that_takes_no_file_is_told(tmp_path: Path) -> None:
    from medusa_cli.errors import TrainingError
    from medusa_cli.trees.tree import TokenTree

    with pytest.raises(TrainingError, match="can't write to"):
        tree_fit._write(tmp_path / "gone", TokenTree.empty(), None, Choice(0, 1.0, 1.0, 1.0), {})


def beliefs(sure: float, right: float, places: int = 1000) -> HeadBeliefs:
    """Two heads that are as sure of their best guess at every place, and right in so many."""
    logp_R = torch.tensor([sure, sure / 10, sure / 20]).log()
    ranks_NK = torch.full((places, 2), 3)
    ranks_NK[: int(right * places)] = 0
    return HeadBeliefs(logp_R.expand(places, 2, 3), ranks_NK)


def test_a_replay_counts_what_would_have_been_kept_and_what_was_looked_at() -> None:
    played = beliefs(0.8, 0.25).replay(DynamicShape(2))
    assert played.tokens == pytest.approx(1.5)
    assert played.sizes == {3: 1000}
    none = beliefs(0.1, 0.25).replay(DynamicShape(4, floor=0.5))
    assert (none.tokens, none.sizes) == (1.0, {1: 1000})


def test_of_dynamic_shapes_the_one_that_gains_most_is_chosen() -> None:
    sure = beliefs(0.9, 0.9)
    mixed = HeadBeliefs(
        torch.cat([sure.logp_NKR, beliefs(0.05, 0).logp_NKR]), torch.cat([sure.ranks_NK, beliefs(0.05, 0).ranks_NK])
    )
    costs = {1: 1.0, 2: 1.5, 3: 2.0, 8: 9.0}
    choice, shape = tree_fit._best(list(tree_fit._promises(mixed, costs, (0.1, 0.1), largest=8)))
    assert shape.floor > 0.03, "guesses that are never right don't pay"
    assert choice.expected_tokens == pytest.approx(1.9)
    assert choice.cost_ratio == pytest.approx((1.1 + 2.0) / 2)
    dear, _ = tree_fit._best(list(tree_fit._promises(mixed, costs, (0.1, 0.9), largest=8)))
    assert dear.cost_ratio == pytest.approx((1.9 + 2.8) / 2)


def test_of_trees_that_are_as_fast_the_one_with_the_fewest_steps_is_taken() -> None:
    slow, few, many = Choice(9, 3.0, 2.0, 1.5), Choice(6, 2.0, 1.01, 1.98), Choice(3, 1.8, 0.9, 2.0)
    shape = DynamicShape(6)
    assert tree_fit._best([(many, None), (few, shape), (slow, DynamicShape(9))]) == (few, shape)
    assert tree_fit._best([(many, None), (slow, shape)]) == (many, None)


def test_drafters_are_timed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10_000))
    monkeypatch.setattr(tree_fit, "now", lambda device: float(next(ticks)))
    assert tree_fit._drafting(target_of(tiny_model("llama")), [NoDrafter(), NoDrafter()], repeats=3) == [1.0, 1.0]


def test_a_draft_that_seems_to_take_no_time_makes_no_step_cheaper_than_a_plain_one() -> None:
    never_right = beliefs(0.5, 0.0)
    for choice, _ in tree_fit._promises(never_right, FLAT, (0.5, 0.1), largest=8):
        assert choice.cost_ratio >= 1
        assert choice.speedup <= 1


def test_heads_that_are_never_right_are_promised_nothing() -> None:
    tree, choice = tree_fit._choose(PathCounts(100, Counter()), FLAT, None, largest=7)
    assert (tree.num_nodes, choice.expected_tokens, choice.speedup) == (1, 1.0, 1.0)


def test_measuring_steps_tells_of_each_round_and_ends_with_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    target = target_of(tiny_model("llama"))
    told: list[tuple[int, int]] = []
    propose = tree_fit._in_rounds(lambda context: None, 2, lambda done, total: told.append((done, total)))
    by_nodes.measure(target, (1, 2, 4), context=16, rounds=tree_fit.COST_REPEATS, patience_s=0.0, propose=propose)
    assert told == [(0, tree_fit.COST_REPEATS + 1), (1, tree_fit.COST_REPEATS + 1)]


def test_every_shape_that_is_tried_is_told() -> None:
    told: list[tuple[int, int]] = []
    beliefs = HeadBeliefs(torch.zeros(4, 2, 3), torch.zeros(4, 2, dtype=torch.long))
    shapes = list(tree_fit._promises(beliefs, FLAT, (0.0, 0.0), 3, lambda done, total: told.append((done, total))))
    assert told == [(number, len(shapes)) for number in range(1, len(shapes) + 1)]
