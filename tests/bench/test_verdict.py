"""What a bench advises depends on what was run: runner, dtype, device, tree, the time of each part, categories."""

from dataclasses import replace
from typing import Any

import pytest

from medusa_cli.bench.report import Setup, build_report
from medusa_cli.bench.run import Trial
from tests.bench.fakes_bench import RUN, SETUP, FakeClock, alike, reply, timed

COMPILED = "--runner compiled"


def verdict(
    setup: Setup = SETUP,
    ours: float = 20,
    theirs: float = 10,
    num_nodes: int = 8,
    split: dict[str, float] | None = None,
    subject: str = "medusa",
    **changes: Any,
) -> str:
    """Of a subject that keeps 2 tokens a step in 5 steps, `ours` seconds against the `theirs` of plain decoding."""
    mine = reply([2] * 5, num_nodes, time_split=split or {})
    trials = timed(FakeClock(), {subject: [mine], "greedy": [reply([1] * 10)]}, {subject: ours, "greedy": theirs})
    same = alike([replace(trial, arm="medusa") if trial.arm == subject else trial for trial in trials])
    return build_report(replace(setup, **changes), trials, subject, same, [], RUN).verdict


def slow(**changes: Any) -> str:
    """The verdict on a run whose steps cost too much."""
    return verdict(split={"draft": 1.0, "verify": 17.0}, **changes)


def test_a_faster_run_says_which_part_takes_the_time() -> None:
    said = verdict(ours=10, theirs=30, split={"draft": 0.8, "verify": 8.3, "accept": 0.2})
    assert "Verifying takes 83 % of the time, guessing 8 %." in said
    assert "Try:" not in said


def test_a_faster_run_that_mostly_guesses_says_so() -> None:
    assert "Guessing takes 60 % of the time, verifying 30 %." in verdict(
        ours=10, theirs=30, split={"draft": 6.0, "verify": 3.0}
    )


def test_a_faster_run_that_mostly_reads_prompts_says_so() -> None:
    said = verdict(ours=10, theirs=30, split={"prefill": 5.0, "draft": 1.0, "verify": 3.0})
    assert "Reading prompts takes 50 % of the time, guessing 10 %." in said


def test_where_parts_are_not_timed_no_part_is_blamed() -> None:
    assert "of the time" not in verdict(ours=10, theirs=30)


@pytest.mark.parametrize("runner", ["packed", "blocks"])
def test_on_a_cpu_without_a_compiled_forward_the_compiled_runner_is_suggested(runner: str) -> None:
    said = slow(runner=runner)
    assert COMPILED in said
    assert "--runner packed" not in said
    assert "bfloat16" not in said


def test_on_the_compiled_runner_guesses_are_called_dear_and_weighing_them_is_suggested() -> None:
    said = slow(runner="compiled")
    assert "a plain step is cheap, so that guesses are dear beside it." in said
    assert "--drafter mixed, which weighs each node by what it costs" in said
    assert "--runner" not in said


def test_an_eager_run_in_float32_on_a_cpu_is_advised_another_layout() -> None:
    assert "--runner packed" in slow(runner="eager")


def test_sixteen_bits_on_a_cpu_are_advised_float32_and_no_runner_that_needs_it() -> None:
    said = slow(runner="eager", dtype="bfloat16")
    assert "--dtype float32" in said
    assert "--runner" not in said


def test_on_a_gpu_only_the_dtype_is_suggested_and_only_where_it_is_float32() -> None:
    assert "--dtype bfloat16" in slow(device="cuda:0")
    already = slow(device="cuda:0", dtype="bfloat16")
    assert "--dtype" not in already
    assert "--runner" not in already


def test_what_is_so_already_is_not_suggested() -> None:
    mixed = slow(runner="compiled", subject="mixed")
    assert "--drafter mixed" not in mixed
    assert "a lower --tree-size" in mixed
    single = slow(num_nodes=2)
    assert "checks a guess costs" in single
    assert "smaller tree" not in single
    assert "heads" not in slow(subject="ngram")


def test_a_step_that_brings_a_little_more_than_it_costs_is_not_said_to_cost_more() -> None:
    trials: list[Trial] = []
    for seconds in (9.0, 11.0):
        mine = timed(
            FakeClock(),
            {"medusa": [reply([2] * 5, 8)], "greedy": [reply([1] * 10)]},
            {"medusa": seconds, "greedy": 10.2},
        )
        trials += [replace(trial, repeat=len(trials) // 2) for trial in mine]
    said = build_report(SETUP, trials, "medusa", alike(trials), [], RUN).verdict
    assert said.startswith("No clear difference: medusa is 1.02x as fast")
    assert "about what it brings" in said


def test_a_slow_run_that_mostly_reads_prompts_is_advised_longer_replies() -> None:
    said = verdict(split={"prefill": 9.0, "draft": 1.0, "verify": 5.0})
    assert "70 % of the time goes to reading prompts and bookkeeping" in said
    assert "--max-new-tokens" in said


@pytest.mark.parametrize(
    ("subject", "cure"), [("medusa", "--speculate on"), ("mixed", "--speculate on"), ("ngram", "--drafter mixed")]
)
def test_without_any_guess_it_is_said_how_to_get_some(subject: str, cure: str) -> None:
    said = verdict(num_nodes=1, subject=subject)
    assert "no guess was offered." in said
    assert cure in said


def categories(speeds: dict[str, float]) -> str:
    """The verdict where each category's prompt takes so many seconds, against 10 of plain decoding."""
    names = list(speeds)
    trials = timed(
        FakeClock(),
        {"medusa": [reply([2] * 5, 8)] * len(names), "greedy": [reply([1] * 10)] * len(names)},
        {"medusa": 1, "greedy": 1},
    )
    placed = [
        replace(
            trial,
            prompt=replace(trial.prompt, category=names[int(trial.prompt.id[1:])]),
            share=speeds[names[int(trial.prompt.id[1:])]] if trial.arm == "medusa" else 10.0,
        )
        for trial in trials
    ]
    return build_report(SETUP, placed, "medusa", alike(placed), [], RUN).verdict


def test_categories_in_which_plain_decoding_is_faster_are_named() -> None:
    said = categories({"math": 2, "coding": 4, "translation": 12.5})
    assert "Slower than greedy in translation (0.80x)." in said


def test_of_many_slow_categories_the_slowest_are_named_and_the_rest_counted() -> None:
    said = categories({"a": 11, "b": 12.5, "c": 20, "d": 16, "e": 1})
    assert "Slower than greedy in c (0.50x), d (0.62x), b (0.80x) and 1 more." in said


def test_where_no_category_is_slower_or_there_is_only_one_nothing_is_said_of_them() -> None:
    assert "Slower than" not in categories({"math": 2, "coding": 4})
    assert "Slower than" not in categories({"all": 20})
