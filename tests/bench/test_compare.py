"""Replies are the same, or differ at a near tie, or the tool is wrong."""

from collections.abc import Sequence

import pytest
import torch

from medusa_cli.bench.baselines import Reply
from medusa_cli.bench.compare import compare
from medusa_cli.bench.run import Trial
from medusa_cli.decode.exactness import first_difference, near_tie_bound
from tests.bench.fakes_bench import prompts


def _trial(arm: str, ids: list[int]) -> Trial:
    return Trial(arm, prompts(1)[0], 0, Reply(ids, "length", 0, [], []), 1.0, 1.0)


def _pair(ours: list[int], theirs: list[int], logits: list[float], dtype: str = "float32", arm: str = "greedy"):
    asked: list[list[int]] = []

    def logits_after(prompt: Sequence[int], common: list[int]) -> torch.Tensor:
        asked.append([*prompt, *common])
        return torch.tensor(logits)

    return compare([_trial("medusa", ours), _trial(arm, theirs)], "medusa", dtype, logits_after), asked


@pytest.mark.parametrize(
    ("ours", "theirs", "index"), [([], [], None), ([1], [1], None), ([1, 2], [1, 3], 1), ([1], [1, 3], 1), ([], [4], 0)]
)
def test_the_first_difference_is_an_index_or_nothing(ours: list[int], theirs: list[int], index: int | None) -> None:
    assert first_difference(ours, theirs) == index


def test_a_gap_within_rounding_is_a_near_tie_and_a_wider_one_a_mismatch() -> None:
    near, asked = _pair([7, 0], [7, 1], [10.0, 10.0 - 1e-5, 0.0])
    assert asked == [[100, 7]], "the margin is taken after the prompt and the common part"
    assert (near.divergences[0].index, near.divergences[0].verdict) == (1, "near-tie")
    wide, _ = _pair([7, 0], [7, 1], [10.0, 9.5, 0.0])
    assert wide.divergences[0].verdict == "mismatch"
    assert wide.divergences[0].margin == pytest.approx(0.5)
    assert (wide.identical["greedy"].same, wide.identical["greedy"].of) == (0, 1)


def test_a_tie_of_the_best_two_excuses_no_third_token() -> None:
    found, _ = _pair([0], [2], [10.0, 10.0, 3.0])
    assert found.divergences[0].verdict == "mismatch"
    assert found.divergences[0].margin == pytest.approx(7.0)


def test_the_bound_grows_with_the_roundness_of_the_dtype_and_the_size_of_the_logits() -> None:
    assert near_tie_bound("float32", 38.0) < 2e-4 < near_tie_bound("float16", 38.0) < near_tie_bound("bfloat16", 38.0)
    assert near_tie_bound("float32", 20.0) == pytest.approx(2 * near_tie_bound("float32", 10.0))


def test_a_pair_of_dtypes_is_judged_by_the_coarser_one() -> None:
    found, _ = _pair([0], [1], [10.0, 9.9, 0.0], arm="hf-greedy@bfloat16")
    assert found.divergences[0].verdict == "near-tie"


def test_llama_cpp_is_judged_by_our_dtype_and_gets_its_margin() -> None:
    found, _ = _pair([0], [1], [10.0, 9.9, 0.0], arm="llama-cpp")
    assert (found.divergences[0].verdict, found.divergences[0].margin) == ("mismatch", pytest.approx(0.1, rel=1e-5))
    found, _ = _pair([0], [1], [10.0, 9.9, 0.0], dtype="bfloat16", arm="llama-cpp")
    assert found.divergences[0].verdict == "near-tie"


def test_a_reply_that_ends_early_is_a_mismatch_without_a_margin() -> None:
    found, asked = _pair([7], [7, 8], [0.0])
    assert (found.divergences[0].margin, found.divergences[0].verdict, asked) == (None, "mismatch", [])


def test_a_token_that_may_not_come_makes_no_other_a_near_tie() -> None:
    found, _ = _pair([0], [1], [10.0, 9.5, float("-inf")])
    assert found.divergences[0].verdict == "mismatch"
    forbidden, _ = _pair([0], [2], [10.0, 9.5, float("-inf")])
    assert (forbidden.divergences[0].margin, forbidden.divergences[0].verdict) == (float("inf"), "mismatch")


def test_in_integers_no_difference_is_a_near_tie() -> None:
    for arm in ("greedy", "hf-greedy@float32"):
        found, _ = _pair([0], [1], [10.0, 10.0 - 1e-6, 0.0], dtype="int8", arm=arm)
        assert found.divergences[0].verdict == "mismatch"
