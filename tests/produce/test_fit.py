"""The tree fitted to accuracies and costs, and the measured cost of a step."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from medusa_cli.drafters.none import NoDrafter
from medusa_cli.produce import cost, fit
from medusa_cli.produce.cost import measure_step_cost
from medusa_cli.train.measure import PathCounts
from tests.tiny_models import target_of, tiny_model

PATHS = PathCounts(10, Counter({(0,): 6, (1,): 3, (0, 0): 4, (0, 1): 1}))
FLAT = {1: 1.0, 8: 1.0}
STEEP = {1: 1.0, 2: 3.0, 8: 9.0}


def test_a_flat_cost_takes_every_path_that_was_ever_right() -> None:
    tree, choice = fit._choose(PATHS, FLAT, None, largest=7)
    assert {tuple(path) for path in tree.paths()} == set(PATHS.counts)
    assert choice.expected_tokens == pytest.approx(2.4)
    assert choice.speedup == pytest.approx(2.4)


def test_a_steep_cost_takes_none() -> None:
    tree, choice = fit._choose(PATHS, STEEP, None, largest=7)
    assert (tree.num_nodes, choice.size, choice.speedup) == (1, 0, 1.0)


def test_a_size_that_is_asked_for_is_kept_and_its_loss_is_told() -> None:
    tree, choice = fit._choose(PATHS, STEEP, 2, largest=7)
    assert sorted(map(tuple, tree.paths())) == [(0,), (0, 0)]
    assert choice.expected_tokens == pytest.approx(2.0)
    assert choice.speedup < 1
    assert fit._choose(PATHS, FLAT, 50, largest=50)[1].size == 4


def test_the_cost_is_measured_for_every_size_that_fits_and_pays_for_the_drafter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.set_num_threads(1)
    target = target_of(tiny_model("llama"))
    ticks = iter(range(10_000))
    monkeypatch.setattr(cost, "_now", lambda target: float(next(ticks)))
    asked = []

    class Counting(NoDrafter):
        def propose(self, context):
            asked.append(context.root_B.shape)
            return super().propose(context)

    costs = measure_step_cost(target, Counting(), max_nodes=8, context=16, repeats=2)
    assert costs == dict.fromkeys(range(1, 9), 1.0)
    assert len(asked) == 3 * 7


def test_a_model_of_few_positions_is_measured_with_fewer_tokens_before(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(tiny_model("gpt2"))
    lengths = []
    prefill = target.prefill
    monkeypatch.setattr(
        target, "prefill", lambda prompts, cache: lengths.append(len(prompts[0])) or prefill(prompts, cache)
    )
    measure_step_cost(target, NoDrafter(), max_nodes=64, context=256, repeats=1)
    assert lengths == [96 - 64]


def test_a_folder_that_takes_no_file_is_told(tmp_path: Path) -> None:
    from medusa_cli.errors import TrainingError
    from medusa_cli.trees.build import Choice
    from medusa_cli.trees.tree import TokenTree

    with pytest.raises(TrainingError, match="can't write to"):
        fit._write(tmp_path / "gone", TokenTree.empty(), Choice(0, 1.0, 1.0, 1.0), {})
