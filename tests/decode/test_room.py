"""The cache of a run is counted before it is taken, and what can't fit is refused with the numbers."""

import pytest
import torch

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.decode import room
from medusa_cli.decode.loop import Parts, decode
from medusa_cli.decode.room import cache_bytes, check_room, free_bytes
from medusa_cli.decode.rows import Limits
from medusa_cli.drafters.none import NoDrafter
from medusa_cli.errors import DataError
from medusa_cli.target.cache import TreeCache
from tests.tiny_models import prompt_of, target_of, tiny_model

TARGET = target_of(tiny_model("llama"))


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_cache_never_takes_more_than_was_counted(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[TreeCache] = []
    new_cache = TARGET.new_cache
    monkeypatch.setattr(TARGET, "new_cache", lambda *size, **named: made.append(new_cache(*size, **named)) or made[-1])
    prompts, limits = [prompt_of(5), prompt_of(17), prompt_of(11)], Limits(24)
    list(decode(Parts(TARGET, NoDrafter(), Greedy()), prompts, limits, num_rows))
    counted, columns = cache_bytes(TARGET, prompts, limits, num_rows, num_nodes=0)
    assert columns == 128
    held = made[0].num_bytes()
    assert held <= counted == held * (TARGET.num_layers + 1) // TARGET.num_layers


def test_longer_texts_more_rows_and_larger_trees_need_more() -> None:
    def needed(length: int, new: int, rows: int, nodes: int) -> int:
        return cache_bytes(TARGET, [prompt_of(length)], Limits(new), rows, nodes)[0]

    base = needed(100, 20, 1, 0)
    assert needed(100, 20, 4, 0) == 4 * base
    assert needed(100, 40, 1, 0) == needed(120, 20, 1, 0) == needed(100, 20, 1, 20) == 2 * base
    assert cache_bytes(TARGET, [prompt_of(90)], Limits(500, context_limit=96), 1, 0)[0] == base


def test_what_can_not_fit_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_bytes", lambda device: 5 * 2**20)
    check_room(TARGET, [prompt_of(5)], Limits(24), 1, 8)
    with pytest.raises(DataError, match=r"200 texts of up to 1,?\d* tokens at once need \d+ MiB .*; 5 MiB are free"):
        check_room(TARGET, [prompt_of(5)], Limits(1500), 200, 8)


def test_what_nobody_can_tell_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(room, "free_bytes", asked.append)
    check_room(TARGET, [prompt_of(5)], Limits(10**9), 10**6, 8)
    assert asked == [TARGET.device]


def test_free_memory_is_a_number_of_this_machine() -> None:
    free = free_bytes(torch.device("cpu"))
    assert free is None or 2**20 < free < 2**50
