"""Each text has random numbers of its own, whatever its seed and key, and measuring shifts nobody's draws."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from medusa_cli.acceptance.random_streams import Stream, _exponential, draw
from medusa_cli.model.costs.by_context import measure_contexts
from medusa_cli.model.costs.by_nodes import measure
from medusa_cli.model.forwards import HoldsNothing, Work
from medusa_cli.model.runners.autotune import forward_seconds, layout_seconds
from medusa_cli.model.target import Target
from tests.tiny_models import target_of, tiny_model


def test_seeds_far_apart_and_texts_side_by_side_share_no_numbers() -> None:
    seeds = [0, 1, 7, 10, 2**32, 2**32 + 7, 2**33 + 7, 2**62 - 1, 2**61 - 1]
    streams = [Stream(seed, key) for seed in seeds for key in (0, 1, 11, 1_000_003, 2**32)]
    assert len({tuple(stream.numbers(0, 3)) for stream in streams}) == len(streams)


def test_a_number_belongs_to_its_place_however_it_is_asked_for() -> None:
    whole = Stream(5, 2).numbers(0, 12)
    stream = Stream(5, 2)
    assert [*stream.numbers(0, 3), *stream.numbers(2, 1), *stream.numbers(3, 9)] == [*whole[:3], whole[2], *whole[3:]]
    assert all(0 <= number < 1 for number in whole)
    assert 0.45 < sum(Stream(1, 1).numbers(0, 10_000)) / 10_000 < 0.55


def language_like(num_rows: int, vocab: int = 49_152) -> Tensor:
    """Logits over a large vocabulary with a long tail, as language models give them."""
    rng = torch.Generator().manual_seed(3)
    order_BV = torch.rand(num_rows, vocab, generator=rng).argsort(-1)
    return -1.1 * (order_BV + 1.0).log() + 0.1 * torch.randn(num_rows, vocab, generator=rng)


def test_rounding_hardly_ever_changes_what_is_drawn() -> None:
    rng, draws, changed = torch.Generator().manual_seed(4), 3000, 0
    for _ in range(draws // 100):
        logits_BV = language_like(100)
        uniform_B = torch.rand(100, dtype=torch.float64, generator=rng)
        # another number of rows or nodes sums in another order
        rounded_BV = logits_BV + 1e-5 * torch.randn(logits_BV.shape, generator=rng)
        one_B, other_B = (draw(each.softmax(-1), uniform_B) for each in (logits_BV, rounded_BV))
        changed += int((one_B != other_B).sum())
    assert changed <= 2, "a running sum changes dozens: the chances of most tokens are smaller than its last digits"


def test_numbers_of_tokens_are_exponential_and_not_of_each_other() -> None:
    number_UV = _exponential(torch.rand(2000, dtype=torch.float64), torch.arange(512)[None]).double()
    assert abs(number_UV.mean() - 1) < 0.01
    assert abs(number_UV.var() - 1) < 0.02
    assert float(number_UV.min()) > 0
    assert number_UV.isfinite().all()
    centred_UV = number_UV - 1
    of_tokens, of_texts = centred_UV.T @ centred_UV / 2000, centred_UV @ centred_UV.T / 512
    for found, width in ((of_tokens, 2000), (of_texts, 512)):
        apart = (found - torch.diag(found.diagonal())).abs() * width**0.5
        assert abs(float(apart.mean()) - (2 / math.pi) ** 0.5) < 0.02
        assert apart.max() < 9, "products of exponential numbers have long tails"


def test_near_numbers_and_near_ids_have_nothing_in_common() -> None:
    uniform_2 = torch.tensor([0.5, 0.5 + 2.0**-53], dtype=torch.float64)
    one_V, other_V = _exponential(uniform_2, torch.arange(20_000)[None])
    for left, right in ((one_V, other_V), (one_V[1:], one_V[:-1]), (one_V[1:], other_V[:-1])):
        assert abs(float(torch.corrcoef(torch.stack([left, right]))[0, 1])) < 0.04


def test_a_token_without_a_chance_is_never_drawn() -> None:
    p_MV = torch.zeros(5000, 7)
    p_MV[:, 3], p_MV[:, 6] = 1e-30, 1e-30
    assert set(draw(p_MV, torch.rand(5000, dtype=torch.float64)).tolist()) == {3, 6}


class Declining(HoldsNothing):
    """A forward that takes nothing."""

    def takes(self, work: Work) -> bool:
        return False


MEASURES: dict[str, Callable[[Target], object]] = {
    "steps": lambda target: measure(target, (1, 2), context=4, rounds=1),
    "contexts": lambda target: measure_contexts(target, (4, 8), (1, 2), rounds=1),
    "forwards": lambda target: forward_seconds(target, "compiled", Declining()),
    "layouts": lambda target: layout_seconds([target.model.lm_head], blocks=False),
}


@pytest.mark.parametrize("what", MEASURES)
def test_what_is_measured_shifts_no_draw_of_others(what: str) -> None:
    target = target_of(tiny_model("llama"))
    before = torch.get_rng_state()
    MEASURES[what](target)
    assert torch.equal(torch.get_rng_state(), before)
