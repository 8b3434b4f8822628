"""The figures: ratios of totals, both lengths, the names of docs/cli.md, and what they say in words."""

import json

import pytest

from medusa_cli.bench.baselines import Reply
from medusa_cli.bench.compare import Comparison, Divergence, Same
from medusa_cli.bench.document import Report
from medusa_cli.bench.report import arm_figures, build_report, percentile, table
from medusa_cli.bench.verdict import break_even, failed_gates
from tests.bench.fakes_bench import RUN, SETUP, FakeClock, alike, reply, timed


def _report(replies: dict[str, list[Reply]], seconds: dict[str, float], repeats: int = 1) -> Report:
    trials = timed(FakeClock(), replies, seconds, repeats)
    return build_report(SETUP, trials, "medusa", alike(trials), [], RUN)


def _faster() -> Report:
    """12 tokens in 3 + 1 forwards against 12 in 11 + 1, one second a forward."""
    return _report({"medusa": [reply([4, 4, 3], 8)] * 3, "greedy": [reply([1] * 11)] * 3}, {"medusa": 4, "greedy": 12})


def test_the_document_has_exactly_the_names_of_the_command_line_page() -> None:
    report = _faster().document()
    assert set(report) == {
        "model", "dtype", "device", "runner", "threads", "ours", "arms", "speedup", "speedup_spread", "identical",
        "divergences", "verdict", "run",
    }  # fmt: skip
    assert set(report["arms"]) == {"medusa", "greedy"}
    for arm in report["arms"].values():
        assert set(arm) == {
            "dtype", "runner",
            "output_throughput", "step_throughput", "duration", "total_output_tokens", "num_steps", "tokens_per_step",
            "spec_decode_acceptance_rate", "spec_decode_acceptance_length", "spec_decode_num_drafts",
            "spec_decode_draft_tokens", "spec_decode_accepted_tokens", "spec_decode_per_position_acceptance_rates",
            "latency_ms", "time_split", "categories", "results",
        }  # fmt: skip
        assert set(arm["latency_ms"]) == {"p50", "p90", "p99"}
        assert set(arm["time_split"]) == {"prefill", "draft", "verify", "accept", "keep", "other"}
        assert set(arm["categories"]["all"]) == {"output_throughput", "tokens_per_step"}
        assert set(arm["results"][0]) == {"id", "category", "token_ids", "finish_reason", "num_steps", "duration"}
    assert set(report["speedup"]) == set(report["speedup_spread"]) == set(report["identical"]) == {"greedy"}
    assert set(report["identical"]["greedy"]) == {"same", "of"}
    json.dumps(report, allow_nan=False)


def test_a_file_from_before_ours_and_prefill_were_kept_is_read_the_first_arm_being_ours() -> None:
    report = _faster().document()
    del report["ours"], report["arms"]["greedy"]["runner"], report["arms"]["medusa"]["time_split"]["prefill"]
    read = Report.model_validate(report)
    assert (read.ours, read.arms["greedy"].runner, read.arms["medusa"].runner) == ("medusa", None, "eager")


def test_each_arm_says_what_it_ran_in() -> None:
    names = ("medusa", "greedy", "hf-greedy@bfloat16", "llama-cpp")
    report = _report({name: [reply([1] * 3)] for name in names}, dict.fromkeys(names, 1.0))
    assert [(arm.dtype, arm.runner) for arm in report.arms.values()][:4] == [
        ("float32", "eager"), ("float32", "eager"), ("bfloat16", "eager"), ("as stored", "llama-cpp"),
    ]  # fmt: skip


def test_a_divergence_has_exactly_its_names() -> None:
    trials = timed(FakeClock(), {"medusa": [reply([1])], "greedy": [reply([1])]}, {"medusa": 1, "greedy": 1})
    found = Comparison({"greedy": Same(0, 1)}, [Divergence("p0", "greedy", 1, 0.5, "mismatch")])
    report = build_report(SETUP, trials, "medusa", found, [], RUN)
    assert set(report.document()["divergences"][0]) == {"id", "arm", "index", "margin", "verdict"}
    assert "NOT IDENTICAL" in report.verdict


def test_steps_that_accept_0_2_and_4_guesses_are_3_tokens_a_step_with_the_bonus_and_2_without() -> None:
    report = _report({"medusa": [reply([1, 3, 5], 8, draft_depth=5)], "greedy": [reply([1] * 9)]},
                     {"medusa": 1, "greedy": 1})  # fmt: skip
    arm = report.arms["medusa"]
    assert (arm.tokens_per_step, arm.spec_decode_acceptance_length) == (3.0, 3.0)
    assert (arm.spec_decode_accepted_tokens, arm.spec_decode_num_drafts) == (6, 3)
    assert arm.total_output_tokens == 1 + 9, "the prefill's token and the sum of the steps"
    assert (arm.spec_decode_draft_tokens, arm.spec_decode_acceptance_rate) == (21, 6 / 21)
    shown = dict(zip(table(report).headers, table(report).rows[0], strict=True))
    assert shown["a step"] == "3.00"
    assert shown["kept"] == "2.00"


def test_acceptance_by_depth_reaches_as_deep_as_the_guesses_did() -> None:
    trials = timed(FakeClock(), {"medusa": [reply([1, 3, 5], 8, draft_depth=5)]}, {"medusa": 1})
    rates = arm_figures(trials, SETUP).spec_decode_per_position_acceptance_rates
    assert rates == pytest.approx([2 / 3, 2 / 3, 1 / 3, 1 / 3, 0.0])


def test_plain_decoding_drafts_nothing_and_divides_by_nothing() -> None:
    arm = _faster().arms["greedy"]
    assert (arm.spec_decode_num_drafts, arm.spec_decode_acceptance_rate) == (0, None)
    assert (arm.spec_decode_acceptance_length, arm.tokens_per_step) == (None, 1.0)


def test_speed_up_is_a_ratio_of_totals_where_one_reply_ends_at_its_first_token() -> None:
    clock = FakeClock()
    replies = {
        "medusa": [reply([], stops=True), reply([3] * 33, 8)],
        "greedy": [reply([], stops=True), reply([1] * 99)],
    }
    trials = timed(clock, replies, {"medusa": 2.0, "greedy": 4.0})
    report = build_report(SETUP, trials, "medusa", alike(trials), [], RUN)
    assert report.speedup["greedy"] == pytest.approx((101 / 4) / (101 / 8))
    assert report.arms["medusa"].num_steps == 33


def test_replies_that_are_empty_or_one_token_long_divide_by_nothing() -> None:
    for nothing in (Reply([], "length", 0, [], []), reply([], stops=True)):
        report = _report({"medusa": [nothing], "greedy": [nothing]}, {"medusa": 1, "greedy": 1})
        assert report.arms["medusa"].tokens_per_step is None
        json.dumps(report.document(), allow_nan=False)
        table(report)
    still = _report({"medusa": [nothing], "greedy": [nothing]}, {"medusa": 0, "greedy": 0})
    assert still.speedup["greedy"] is None
    assert still.verdict.startswith("No verdict")


def test_the_spread_is_over_repeats_or_over_thirds_of_the_prompts() -> None:
    clock = FakeClock()
    trials = timed(clock, {"medusa": [reply([4], 8)] * 4, "greedy": [reply([1] * 4)] * 4}, {"medusa": 1, "greedy": 2})
    slow_last = [t if t.prompt.id != "p1" or t.arm != "medusa" else type(t)(**{**vars(t), "share": 4.0})
                 for t in trials]  # fmt: skip
    report = build_report(SETUP, slow_last, "medusa", alike(trials), [], RUN)
    assert report.speedup_spread["greedy"] == pytest.approx((0.5, 2.0))
    assert _report(
        {"medusa": [reply([4], 8)], "greedy": [reply([1] * 4)]}, {"medusa": 1, "greedy": 2}, 3
    ).speedup_spread["greedy"] == pytest.approx((2.0, 2.0))


def test_percentiles_lie_between_neighbours() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0], 0.99) == 3.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5


def test_time_that_no_part_accounts_for_is_other_and_unmeasured_parts_are_none() -> None:
    timed_reply = reply([2], 4, time_split={"draft": 0.5, "verify": 2.0})
    report = _report({"medusa": [timed_reply], "greedy": [reply([1, 1])]}, {"medusa": 4, "greedy": 4})
    split = report.arms["medusa"].time_split.model_dump()
    assert split == {"prefill": None, "draft": 0.5, "verify": 2.0, "accept": None, "keep": None, "other": 1.5}
    assert set(report.arms["greedy"].time_split.model_dump().values()) == {None}


def test_reading_prompts_is_told_apart_from_steps() -> None:
    ours, theirs = ({"prefill": 1.0, "verify": verify} for verify in (2.0, 4.0))
    replies = {"medusa": [reply([2] * 3, time_split=ours)], "greedy": [reply([1] * 6, time_split=theirs)]}
    report = _report(replies, {"medusa": 3, "greedy": 5})
    assert [report.arms[name].step_throughput for name in ("medusa", "greedy")] == [3.0, 1.5]
    assert "Prompts were read in 33 % of the time; in steps alone it is 2.00x as fast as greedy." in report.verdict
    shown = table(report)
    assert [row[shown.headers.index("in steps")] for row in shown.rows] == ["3.0", "1.5"]
    untimed = _report({"medusa": [reply([2])], "greedy": [reply([1, 1])]}, {"medusa": 1, "greedy": 2})
    assert untimed.arms["medusa"].step_throughput is None
    assert "Prompts were read" not in untimed.verdict


def test_the_plain_name_of_an_arm_in_two_dtypes_is_the_faster_of_them() -> None:
    replies = {name: [reply([1] * 5)] for name in ("medusa", "hf-greedy@float32", "hf-greedy@bfloat16")}
    seconds = {"medusa": 1, "hf-greedy@float32": 4, "hf-greedy@bfloat16": 2}
    report = _report(replies, seconds)
    assert report.speedup == {"hf-greedy@float32": 4.0, "hf-greedy@bfloat16": 2.0, "hf-greedy": 2.0}
    assert [row[0] for row in table(report).rows] == list(replies)
    assert "2.00x as fast as hf-greedy@bfloat16, the faster of 2" in report.verdict


def test_a_faster_run_says_by_how_much_and_where_break_even_lies() -> None:
    report = _faster()
    assert report.verdict.startswith("Faster: medusa is 3.00x as fast as greedy (3.00 to 3.00).")
    assert "cause" not in report.verdict
    assert "Every reply is the same" in report.verdict


def test_break_even_is_where_the_two_arms_are_equally_fast() -> None:
    replies = {"medusa": [reply([2] * 10, 8)] * 2, "greedy": [reply([1] * 20)] * 2}
    report = _report(replies, {"medusa": 10.0, "greedy": 10.0})
    assert report.speedup["greedy"] == 1.0
    assert break_even(report, "greedy") == pytest.approx(report.arms["medusa"].tokens_per_step)
    assert report.verdict.startswith("No clear difference")


def test_a_draft_that_never_matches_gets_slower_its_cause_break_even_and_what_to_try() -> None:
    report = _report({"medusa": [reply([1] * 9, 8)], "greedy": [reply([1] * 9)]}, {"medusa": 15, "greedy": 10})
    said = report.verdict
    assert said.startswith("Slower: medusa is 0.67x as fast")
    assert "almost no guess was right" in said
    assert "break-even: 1.56 tokens a step" in said
    assert "train-heads" in said


@pytest.mark.parametrize(
    ("split", "cause"), [({"draft": 9.0, "verify": 5.0}, "guessing takes"), ({}, "a step that checks 7 guesses costs")]
)
def test_a_slow_run_with_right_guesses_blames_the_dear_part(split: dict[str, float], cause: str) -> None:
    ours = reply([2] * 5, 8, time_split=split)
    assert cause in _report({"medusa": [ours], "greedy": [reply([1] * 10)]}, {"medusa": 20, "greedy": 10}).verdict


def test_a_low_speed_up_fails_its_gate_and_a_high_one_passes() -> None:
    assert failed_gates(_faster(), 2.9, True) == []
    assert "3.000x; --min-speedup asks for 3.5x" in failed_gates(_faster(), 3.5, False)[0]


@pytest.mark.parametrize(
    ("arm", "verdict", "fails"),
    [
        ("greedy", "mismatch", True),
        ("greedy", "near-tie", False),
        ("hf-greedy@bfloat16", "mismatch", False),
        ("llama-cpp", "mismatch", False),
    ],
)
def test_only_a_mismatch_in_the_same_dtype_fails_the_identity_gate(arm: str, verdict: str, fails: bool) -> None:
    report = _faster().model_copy(update={"divergences": [Divergence("p0", arm, 3, 0.5, verdict)]})
    assert bool(failed_gates(report, None, True)) is fails
    assert failed_gates(report, None, False) == []


def _beside_llama_cpp(found: Comparison, seconds: float, *more: str) -> Report:
    """12 tokens in 3 + 1 forwards; llama.cpp writes them in so many seconds, and the arms of `more` in as many."""
    plain = [reply([1] * 11)] * 3
    others = (*more, "llama-cpp")
    trials = timed(
        FakeClock(),
        {"medusa": [reply([4, 4, 3], 8)] * 3, **dict.fromkeys(others, plain)},
        {"medusa": 4, **dict.fromkeys(others, seconds)},
    )
    return build_report(SETUP, trials, "medusa", found, [], RUN)


def test_llama_cpp_is_told_in_words_to_take_the_weights_as_stored_and_to_be_held_to_no_reply() -> None:
    parted = [Divergence("p1", "llama-cpp", 3, 1e-6, "near-tie"), Divergence("p2", "llama-cpp", 3, 0.5, "mismatch")]
    report = _beside_llama_cpp(Comparison({"greedy": Same(3, 3), "llama-cpp": Same(1, 3)}, parted), 8, "greedy")
    assert table(report).rows[-1][0] == "llama-cpp (as stored)"
    assert table(report).rows[-1][-1] == "1 of 3"
    said = report.verdict
    assert "Every reply is the same, token by token. llama-cpp takes the weights as the file stores them" in said
    assert "medusa is 2.00x as fast, and 1 of 3 replies are the same; none has to be." in said
    assert "NOT IDENTICAL" not in said
    assert failed_gates(report, None, True) == []


def test_where_only_llama_cpp_differs_no_reply_of_ours_is_said_to_part_at_a_near_tie() -> None:
    parted = [Divergence("p1", "llama-cpp", 3, 1e-6, "near-tie")]
    assert "near ties only" not in _beside_llama_cpp(Comparison({"llama-cpp": Same(2, 3)}, parted), 8).verdict


def test_a_run_slower_than_llama_cpp_blames_its_smaller_weights_and_no_guess() -> None:
    said = _beside_llama_cpp(Comparison({"llama-cpp": Same(3, 3)}, []), 2).verdict
    assert said.startswith("Slower: medusa is 0.50x as fast as llama-cpp")
    assert "Cause: llama.cpp reads the weights as the file stores them" in said
    assert "a smaller tree" not in said
