"""Each text has random numbers of its own, whatever its seed and key, and measuring shifts nobody's draws."""

from collections.abc import Callable

import pytest
import torch

from medusa_cli.acceptance.random_streams import Stream
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
