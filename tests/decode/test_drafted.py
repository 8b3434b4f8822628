"""What the engine hands out of a step's guesses: the trees that were verified, and the paths that were kept."""

import pytest

from medusa_cli.decode.engine import Engine, Request
from medusa_cli.decode.rows import Limits
from tests.decode.tiny_llama import TARGET, TEXTS
from tests.fakes import SHAPES, RandomDrafter


@pytest.mark.parametrize("shape", ["chain", "wide", "dynamic", "padded"])
@pytest.mark.parametrize("stop", [False, True])
def test_the_engine_hands_out_the_trees_that_it_verified(shape: str, stop: bool) -> None:
    engine, last, accepted = Engine(TARGET(), RandomDrafter(TEXTS().texts, SHAPES[shape]), max_rows=3), {}, 0
    for prompt, text in zip(TEXTS().prompts, TEXTS().texts, strict=True):
        stops = frozenset({text[len(prompt) + 6]}) if stop else frozenset[int]()
        last[engine.add(Request(prompt, Limits(12, stops)))] = -1
    while not engine.idle:
        for gain in engine.step():
            if gain.drafted is not None:
                seen = gain.drafted.verified()
                assert seen.ids[0] == last[gain.row.key]
                assert [seen.ids[node] for node in seen.kept[1:]] == list(gain.tokens[:-1])
                assert [seen.parents[node] for node in seen.kept] == [-1, *seen.kept[:-1]]
                siblings = list(zip(seen.parents, seen.ids, strict=True))
                assert len(set(siblings)) == len(siblings), "padding is left out"
                accepted += len(seen.kept) - 1
            last[gain.row.key] = gain.tokens[-1]
    assert accepted > 2
