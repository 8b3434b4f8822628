"""The cache of a run is counted before it is taken, and what can't fit is refused with the numbers."""

import pytest
import torch

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.decode import memory
from medusa_cli.decode.loop import Parts, decode
from medusa_cli.decode.memory import check_room, free_bytes, needed_bytes
from medusa_cli.decode.rows import AHEAD, Limits
from medusa_cli.drafters.none import NoDrafter
from medusa_cli.errors import DataError
from medusa_cli.model import prefill
from medusa_cli.model.cache import TreeCache
from tests.tiny_models import prompt_of, target_of, tiny_model

TARGET = target_of(tiny_model("llama"))


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_cache_never_takes_more_than_was_counted(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[TreeCache] = []
    new_cache = TARGET.new_cache
    monkeypatch.setattr(TARGET, "new_cache", lambda *size, **named: made.append(new_cache(*size, **named)) or made[-1])
    prompts, limits = [prompt_of(5), prompt_of(17), prompt_of(11)], Limits(24)
    list(decode(Parts(TARGET, NoDrafter(), Greedy()), prompts, limits, num_rows))
    needed = needed_bytes(TARGET, prompts, limits, num_rows, num_nodes=0)
    assert needed.columns == 128
    assert made[0].num_bytes() == needed.cache


def test_a_cache_that_grows_holds_a_layer_twice_for_a_moment() -> None:
    prompts, layers = [prompt_of(5)], TARGET.num_layers
    roomy, growing = (needed_bytes(TARGET, prompts, Limits(new), 1, num_nodes=0) for new in (AHEAD, AHEAD + 200))
    assert roomy.cache == roomy.columns * TARGET.cache_bytes_per_token
    assert growing.cache == growing.columns * TARGET.cache_bytes_per_token * (layers + 1) // layers


def test_longer_texts_more_rows_and_larger_trees_need_more() -> None:
    def needed(length: int, new: int, rows: int, nodes: int) -> int:
        return needed_bytes(TARGET, [prompt_of(length)], Limits(new), rows, nodes).cache

    base = needed(100, 20, 1, 0)
    assert needed(100, 20, 4, 0) == 4 * base
    assert needed(100, 40, 1, 0) == needed(120, 20, 1, 0) == 2 * base
    assert needed(100, 20, 1, 20) > 2 * base, "the nodes' columns come when the first texts are there"
    assert needed_bytes(TARGET, [prompt_of(90)], Limits(500, context_limit=96), 1, 0).cache == base
    steps = [needed_bytes(TARGET, [prompt_of(1)], Limits(20), 50, nodes).forward for nodes in (0, 8, 80)]
    assert steps == sorted(set(steps))


def test_reading_a_long_prompt_takes_no_more_than_a_piece_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", 64)
    forwards = [needed_bytes(TARGET, [[1] * 64] * rows, Limits(1), rows, 0).forward for rows in (1, 2)]
    logits = TARGET.vocab_size * 4 * 3
    assert forwards[1] - forwards[0] == logits
    at_once = [needed_bytes(TARGET, [[1] * 64] * rows, Limits(1), rows, 0, in_pieces=False).forward for rows in (1, 2)]
    assert at_once == [forwards[0], 2 * forwards[0]], "transformers reads them with one forward"


def test_what_can_not_fit_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 5 * 2**20)
    check_room(TARGET, [prompt_of(5)], Limits(24), 1, 8)
    with pytest.raises(
        DataError,
        match=r"200 texts .* need \d+ MiB: \d+ for keys and values, \d+ for a .*; 5 MiB are free",
    ):
        check_room(TARGET, [prompt_of(5)], Limits(1500), 200, 8)


def test_what_nobody_can_tell_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(memory, "free_bytes", asked.append)
    check_room(TARGET, [prompt_of(5)], Limits(10**9), 10**6, 8)
    assert asked == [TARGET.device]


def test_free_memory_is_a_number_of_this_machine() -> None:
    free = free_bytes(torch.device("cpu"))
    assert free is None or 2**20 < free < 2**50
