"""Lossless acceptance: whatever is guessed, tokens come as the target's own samples would. Law 2, on fake logits.

Twenty thousand rows are drawn at once; a chi-square test at the 0.1 % level compares them with the exact law.
"""

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from medusa_cli.acceptance import lossless
from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.acceptance.lossless import Lossless
from medusa_cli.contracts import AcceptanceRule, Draft, Uniform, Verdict
from medusa_cli.trees.tree import TokenTree
from tests.fakes import follows

DRAWS = 20_000
PLAIN = Lossless(temperature=1.0, top_p=1.0, top_k=0)


def rng_of(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def uniform_for(num_rows: int, seed: int = 0) -> Uniform:
    rng = rng_of(seed)
    return lambda count: torch.rand(num_rows, count, dtype=torch.float64, generator=rng)


def accepted(rule: Lossless, tokens_N: list[int], tree: TokenTree, logits_NV: Tensor, seed: int = 0) -> Verdict:
    """DRAWS rows with the same draft and the same logits at its nodes."""
    draft = Draft(torch.tensor([tokens_N]).expand(DRAWS, -1), tree)
    return rule.accept(draft, logits_NV.expand(DRAWS, -1, -1), uniform_for(DRAWS, seed))


def gained(verdict: Verdict, tokens_N: list[int], place: int) -> Tensor:
    """The token gained at a place by the rows that gained so many; the last one is the bonus token."""
    tokens_BD = torch.tensor(tokens_N)[verdict.path_BD.clamp(min=0)]
    guesses_BD = torch.cat([tokens_BD[:, 1:], verdict.next_B[:, None]], dim=1)
    token_B = torch.where(verdict.kept_B - 1 == place, verdict.next_B, guesses_BD[:, place])
    return token_B[verdict.kept_B > place]


def test_the_chi_square_test_can_fail() -> None:
    # the frequencies that trying each sibling with a draw of its own gives
    biased = torch.multinomial(torch.tensor([0.238, 0.288, 0.368, 0.107]), DRAWS, True, generator=rng_of())
    assert not follows(biased, torch.full((4,), 0.25))
    assert follows(torch.randint(0, 4, (DRAWS,), generator=rng_of()), torch.full((4,), 0.25))


@pytest.mark.parametrize("seed", range(3))
def test_a_uniform_target_stays_uniform_with_three_of_four_tokens_in_the_tree(seed: int) -> None:
    # Medusa#56: the token outside the tree came with 0.11 instead of 0.25
    tokens = [3, 0, 1, 2]
    verdict = accepted(PLAIN, tokens, TokenTree.from_paths([[0], [1], [2]]), torch.zeros(4, 4), seed)
    assert follows(gained(verdict, tokens, 0), torch.full((4,), 0.25))
    kept = (verdict.kept_B == 2).long()
    assert follows(kept, torch.tensor([0.25, 0.75]))


def test_a_guess_that_never_changes_does_not_come_more_often() -> None:
    # transformers#32867: 0.75 / 0.25
    p = torch.tensor([0.6, 0.4])
    verdict = accepted(PLAIN, [1, 0], TokenTree.chain(1), p.log().expand(2, 2))
    assert follows(gained(verdict, [1, 0], 0), p)
    assert follows(gained(verdict, [1, 0], 1), p)


def test_every_token_follows_the_law_at_its_own_prefix() -> None:
    tokens, tree = [4, 0, 1, 2, 3, 0], TokenTree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0]])
    logits_NV = torch.randn(6, 5, generator=rng_of(7))
    p_NV = logits_NV.softmax(-1)
    verdict = accepted(PLAIN, tokens, tree, logits_NV)
    assert follows(gained(verdict, tokens, 0), p_NV[0])
    paths = verdict.path_BD.tolist()
    for child in (1, 2):
        through = torch.tensor([path[1] == child for path in paths])
        second = Verdict(verdict.path_BD[through], verdict.kept_B[through], verdict.next_B[through])
        assert follows(gained(second, tokens, 1), p_NV[child])
    for leaf in (3, 4, 5):
        ended = torch.tensor([path[2] == leaf for path in paths])
        assert follows(verdict.next_B[ended], p_NV[leaf])


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    [(0.7, 0.5, 2), (0.7, 0.9, 0), (1.3, 1.0, 3), (1.0, 0.6, 0), (0.5, 0.95, 5), (1.0, 0.01, 0), (1.0, 1.0, 1)],
)
def test_probabilities_are_those_of_the_library_s_processors(temperature: float, top_p: float, top_k: int) -> None:
    # transformers#47932: ratios of unprocessed probabilities
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    logits_BV = 2 * torch.randn(50, 12, generator=rng_of(1))
    wanted_BV = processors(None, logits_BV).softmax(-1)
    rule = Lossless(temperature=temperature, top_p=top_p, top_k=top_k)
    torch.testing.assert_close(rule.probabilities(logits_BV), wanted_BV)
    torch.testing.assert_close(rule.probabilities(logits_BV[:, None]), wanted_BV[:, None])


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(0.7, 0.5, 2), (0.8, 0.8, 0), (1.5, 1.0, 4), (2.0, 0.9, 6)]
)
def test_draws_follow_the_processed_law_at_the_root_and_below(temperature: float, top_p: float, top_k: int) -> None:
    rule = Lossless(temperature=temperature, top_p=top_p, top_k=top_k)
    logits_NV = torch.randn(3, 8, generator=rng_of(2))
    p_NV = rule.probabilities(logits_NV)
    tokens = [0, *p_NV[0].topk(2).indices.tolist()]
    verdict = accepted(rule, tokens, TokenTree.from_paths([[0], [1]]), logits_NV)
    assert follows(gained(verdict, tokens, 0), p_NV[0])
    for child in (1, 2):
        assert follows(verdict.next_B[verdict.path_BD[:, 1] == child], p_NV[child])
    assert follows(rule.first(logits_NV[:1].expand(DRAWS, -1), uniform_for(DRAWS)), p_NV[0])


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 1.0])
def test_a_nucleus_is_taken_for_a_first_token_and_for_every_node(top_p: float, num_rows: int) -> None:
    # EAGLE#215: a dimension error on the bonus token
    rule = Lossless(temperature=0.9, top_p=top_p, top_k=0)
    assert rule.first(torch.randn(num_rows, 5), uniform_for(num_rows)).shape == (num_rows,)
    for tree in (TokenTree.empty(), TokenTree.chain(3)):
        draft = Draft(torch.zeros(num_rows, tree.num_nodes, dtype=torch.long), tree)
        verdict = rule.accept(draft, torch.randn(num_rows, tree.num_nodes, 5), uniform_for(num_rows))
        assert verdict.next_B.shape == (num_rows,)


def test_a_nucleus_wider_than_the_tokens_looked_at_first_is_drawn_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lossless, "NEAR", 4)
    rule = Lossless(temperature=1.0, top_p=0.75, top_k=0)
    flat_V, sharp_V = 0.3 * torch.randn(20, generator=rng_of(3)), torch.zeros(20)
    sharp_V[11] = 20.0
    drawn_M2 = rule.first(torch.stack([flat_V, sharp_V]).repeat(DRAWS, 1), uniform_for(2 * DRAWS)).view(DRAWS, 2)
    assert (drawn_M2[:, 1] == 11).all()
    assert follows(drawn_M2[:, 0], rule.probabilities(flat_V))


def test_top_k_larger_than_the_vocabulary_keeps_all() -> None:
    logits = torch.randn(4, generator=rng_of())
    torch.testing.assert_close(Lossless(1.0, 1.0, 50).probabilities(logits), logits.softmax(-1))


def test_half_precision_logits_are_drawn_from_in_float32() -> None:
    assert PLAIN.probabilities(torch.zeros(4, dtype=torch.bfloat16)).dtype == torch.float32


def test_the_same_seed_draws_the_same_and_another_seed_does_not() -> None:
    # vllm#16077
    tokens, tree, logits_NV = [3, 0, 1, 2], TokenTree.from_paths([[0], [1], [2]]), torch.zeros(4, 4)
    first, again, other = (accepted(PLAIN, tokens, tree, logits_NV, seed) for seed in (5, 5, 6))
    assert torch.equal(first.next_B, again.next_B)
    assert torch.equal(first.path_BD, again.path_BD)
    assert not torch.equal(first.next_B, other.next_B)


@pytest.mark.parametrize("rule", [Greedy(), PLAIN, Lossless(0.7, 0.9, 5), Lossless(0.7, 1.0, 0), Lossless(1.0, 0.5, 0)])
def test_every_way_to_accept_runs_and_is_exact(rule: AcceptanceRule) -> None:
    # an advertised mode of Medusa's raised a TypeError
    draft = Draft(torch.tensor([[3, 0, 1], [2, 1, 0]]), TokenTree.from_paths([[0], [0, 0]]))
    verdict = rule.accept(draft, torch.randn(2, 3, 9), uniform_for(2))
    assert verdict.path_BD.shape == (2, 3)
    assert rule.first(torch.randn(2, 9), uniform_for(2)).shape == (2,)
    assert rule.exact


def test_padding_nodes_are_never_kept() -> None:
    tree = TokenTree(torch.tensor([[0, 0]]), torch.zeros(1, 2).long(), torch.tensor([[True, False]]))
    verdict = accepted(PLAIN, [1, 0], tree, torch.zeros(2, 2))
    assert (verdict.kept_B == 1).all()
    assert follows(verdict.next_B, torch.tensor([0.5, 0.5]))
