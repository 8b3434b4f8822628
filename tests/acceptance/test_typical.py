"""Typical acceptance: likely enough guesses are kept, as the paper's rule says, and nothing pretends to be exact."""

import math

import pytest
import torch
from torch import Tensor

from medusa_cli.acceptance.typical import Typical
from medusa_cli.contracts import Draft, Uniform
from medusa_cli.decode.loop import Parts, collect
from medusa_cli.decode.rows import Limits
from medusa_cli.trees.tree import TokenTree
from tests.fakes import DRAFTERS, SHAPES
from tests.tiny_models import NUM_NEW, known, target_of, tiny_model

VOCAB = 6


def uniform_for(num_rows: int) -> Uniform:
    rng = torch.Generator().manual_seed(num_rows)
    return lambda count: torch.rand(num_rows, count, dtype=torch.float64, generator=rng)


def logits_of(p_NV: list[list[float]]) -> Tensor:
    return torch.tensor([p_NV]).log()


def test_a_guess_is_kept_when_it_is_likelier_than_the_rule_asks() -> None:
    p_V = [0.5, 0.2, 0.12, 0.08, 0.07, 0.03]
    entropy = -sum(p * math.log(p) for p in p_V)
    for threshold, alpha in ((0.09, 0.3), (0.9, 0.3), (0.09, 10.0)):
        least = min(threshold, alpha * math.exp(-entropy))
        for token, p in enumerate(p_V):
            draft = Draft(torch.tensor([[4, token]]), TokenTree.chain(1))
            verdict = Typical(1.0, threshold, alpha).accept(draft, logits_of([p_V, p_V]), uniform_for(1))
            assert verdict.kept_B.tolist() == [2 if p > least else 1], (threshold, alpha, token)


def test_a_temperature_flattens_what_is_likely() -> None:
    p_V = [0.9, 0.05, 0.02, 0.01, 0.01, 0.01]
    draft = Draft(torch.tensor([[4, 1]]), TokenTree.chain(1))
    assert Typical(1.0, 0.09, 1.0).accept(draft, logits_of([p_V, p_V]), uniform_for(1)).kept_B.tolist() == [1]
    assert Typical(3.0, 0.09, 1.0).accept(draft, logits_of([p_V, p_V]), uniform_for(1)).kept_B.tolist() == [2]


def test_the_deepest_path_wins_and_between_equals_the_likeliest() -> None:
    tree = TokenTree.from_paths([[0], [1], [2], [0, 0], [1, 0], [2, 0]])
    draft = Draft(torch.tensor([[4, 0, 1, 2, 3, 3, 3]]), tree)
    root = [0.4, 0.35, 0.25, 1e-6, 1e-6, 1e-6]
    likely, unlikely = [1e-6, 1e-6, 1e-6, 0.9, 0.1, 1e-6], [0.9, 0.1, 1e-6, 1e-6, 1e-6, 1e-6]
    rule = Typical(1.0)
    after = [root, likely, likely, likely, root, root, root]
    assert rule.accept(draft, logits_of(after), uniform_for(1)).path_BD.tolist() == [[0, 1, 4]]
    after[1] = unlikely
    assert rule.accept(draft, logits_of(after), uniform_for(1)).path_BD.tolist() == [[0, 2, 5]]
    after[2] = after[3] = unlikely
    assert rule.accept(draft, logits_of(after), uniform_for(1)).path_BD.tolist() == [[0, 1, -1]]


def test_what_follows_is_drawn_from_what_is_likely_enough() -> None:
    p_V = [0.45, 0.4, 0.05, 0.05, 0.03, 0.02]
    rule = Typical(1.0, 0.3, 10.0)
    drawn = rule.first(logits_of([p_V] * 2000)[0], uniform_for(2000))
    assert set(drawn.tolist()) == {0, 1}
    assert (drawn == 0).float().mean().item() == pytest.approx(0.45 / 0.85, abs=0.04)
    # where nothing is likely enough the best token is left
    assert rule.first(logits_of([[0.2, 0.16, 0.16, 0.16, 0.16, 0.16]] * 50)[0], uniform_for(50)).unique().tolist() == [
        0
    ]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_tree_writes_its_tokens(shape: str) -> None:
    texts = known("llama")
    parts = Parts(target_of(tiny_model("llama")), DRAFTERS["random"](texts.texts, SHAPES[shape]), Typical(0.7))
    found = collect(parts, texts.prompts, Limits(NUM_NEW), max_rows=3)
    assert {len(each.token_ids) for each in found} == {NUM_NEW}


def test_padding_is_never_kept() -> None:
    tree = TokenTree(torch.tensor([[0, 0, 0]]), torch.tensor([[0, 0, 0]]), torch.tensor([[True, True, False]]))
    draft = Draft(torch.tensor([[4, 5, 0]]), tree)
    p_V = [0.9, 0.06, 0.01, 0.01, 0.01, 0.01]
    assert Typical(1.0).accept(draft, logits_of([p_V] * 3), uniform_for(1)).kept_B.tolist() == [1]


def test_typical_says_that_it_is_not_exact() -> None:
    assert not Typical(0.7).exact
