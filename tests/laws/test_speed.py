"""Law 3, speed without a clock: how many forwards a text costs follows from how good the guesses are."""

import functools
import math

import pytest

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.decode.loop import Generation, Parts, collect
from medusa_cli.decode.rows import Limits
from medusa_cli.drafters.none import NoDrafter
from medusa_cli.trees.tree import TokenTree
from tests.fakes import DEPTH, SHAPES, KnowingDrafter, OracleDrafter, PerPositionDrafter, WrongDrafter
from tests.tiny_models import NUM_NEW, known, target_of, tiny_model

TEXTS = functools.cache(lambda: known("llama"))
TARGET = functools.cache(lambda: target_of(tiny_model("llama")))


def written(drafter: KnowingDrafter | NoDrafter, num_rows: int, num_new: int = NUM_NEW) -> list[Generation]:
    found = collect(Parts(TARGET(), drafter, Greedy()), TEXTS().prompts[:num_rows], Limits(num_new), num_rows)
    assert [each.token_ids for each in found] == TEXTS().wanted(num_rows, num_new)
    return found


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("shape", ["chain", "wide", "padded"])
@pytest.mark.parametrize("num_new", [1, 2, DEPTH + 1, DEPTH + 2, DEPTH + 3, NUM_NEW])
def test_an_oracle_draft_is_accepted_to_its_leaf(shape: str, num_rows: int, num_new: int) -> None:
    # EAGLE#264; the prefill gives one token and each step DEPTH guesses with the token after them
    for each in written(OracleDrafter(TEXTS().texts, SHAPES[shape]), num_rows, num_new):
        assert each.num_steps == math.ceil((num_new - 1) / (DEPTH + 1))
        assert each.kept[:-1] == [DEPTH + 1] * (each.num_steps - 1)


@pytest.mark.parametrize("depth", range(7))
def test_a_deeper_oracle_needs_fewer_steps(depth: int) -> None:
    drafter = OracleDrafter(TEXTS().texts, lambda num_rows, rng: TokenTree.chain(depth))
    (found,) = written(drafter, 1)
    assert found.num_steps == math.ceil((NUM_NEW - 1) / (depth + 1))


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_wrong_draft_costs_exactly_one_token_a_step(shape: str, num_rows: int) -> None:
    # TensorRT-LLM#2127
    for each in written(WrongDrafter(TEXTS().texts, SHAPES[shape]), num_rows):
        assert each.kept == [1] * (NUM_NEW - 1)


def test_no_drafter_is_plain_decoding() -> None:
    for each in written(NoDrafter(), 3):
        assert each.kept == each.num_nodes == [1] * (NUM_NEW - 1)


@pytest.mark.parametrize("shape", ["chain", "wide", "padded"])
def test_a_step_keeps_as_many_guesses_as_are_right_from_the_top(shape: str) -> None:
    right = [0, 3, 1, DEPTH, 2, 2]
    for each in written(PerPositionDrafter(TEXTS().texts, SHAPES[shape], right), 3):
        wanted = [1 + guesses for guesses in right * 4][: each.num_steps]
        wanted[-1] = NUM_NEW - 1 - sum(wanted[:-1])
        assert each.kept == wanted


def test_nodes_are_counted_with_the_root_and_its_padding() -> None:
    (found,) = written(OracleDrafter(TEXTS().texts, SHAPES["padded"]), 1)
    tree = SHAPES["padded"](1, None)
    assert found.num_nodes == [tree.num_nodes] * found.num_steps
