"""Arms run interleaved, warm and clean, under one stop rule."""

import pytest

from medusa_cli.bench.baselines import Reply, StopRule
from medusa_cli.bench.run import run_bench, unsteady
from medusa_cli.errors import DataError
from tests.bench.fakes_bench import STOP, FakeArm, FakeClock, plan, prompts, reply


def _quiet(done: int, total: int) -> None:
    pass


def test_tokens_are_counted_from_ids_clipped_at_the_stop_for_every_arm() -> None:
    clock = FakeClock()
    past_the_stop = Reply([5, 6, STOP, 7, 8], "length", 2, [2, 2], [3, 3])
    at_the_stop = Reply([5, 6, STOP], "stop", 2, [1, 1], [1, 1])
    arms = [FakeArm("medusa", clock, lambda _: past_the_stop), FakeArm("greedy", clock, lambda _: at_the_stop)]
    trials = run_bench(arms, prompts(1), plan(), clock, _quiet)
    assert [list(trial.reply.token_ids) for trial in trials] == [[5, 6, STOP]] * 2
    assert {trial.reply.finish_reason for trial in trials} == {"stop"}
    assert list(trials[0].reply.kept) == [2, 0], "tokens past the stop belong to no step"


def test_no_arm_gets_more_tokens_than_the_budget_or_the_context_holds() -> None:
    clock = FakeClock()
    arm = FakeArm("medusa", clock, lambda _: reply([3, 3, 3]))
    short = run_bench([arm], prompts(1), plan(stop=StopRule(frozenset(), 4, None)), clock, _quiet)[0].reply
    assert (len(short.token_ids), list(short.kept), short.finish_reason) == (4, [3, 0, 0], "length")
    full = run_bench([arm], prompts(1), plan(stop=StopRule(frozenset(), 50, 7)), clock, _quiet)[0].reply
    assert len(full.token_ids) == 6, "one prompt token and six new ones fill a context of seven"


def test_a_prompt_that_leaves_no_room_is_refused_before_any_forward() -> None:
    clock = FakeClock()
    arm = FakeArm("medusa", clock, lambda _: reply([1]))
    with pytest.raises(DataError, match="leaves no room"):
        run_bench([arm], prompts(3), plan(num_warmups=1, stop=StopRule(frozenset(), 5, 1)), clock, _quiet)
    assert arm.calls == []


def test_the_order_of_the_arms_turns_with_each_prompt_and_each_repeat() -> None:
    clock, calls = FakeClock(), []
    arms = [FakeArm(name, clock, lambda _: reply([1]), calls=calls) for name in ("a", "b", "c")]
    run_bench(arms, prompts(3), plan(repeats=2), clock, _quiet)
    order = [name for name, _ in calls]
    assert ["".join(order[n : n + 3]) for n in range(0, 18, 3)] == ["abc", "bca", "cab", "bca", "cab", "abc"]


def test_warm_up_prompts_run_on_every_arm_and_are_not_counted() -> None:
    clock = FakeClock()
    arms = [FakeArm(name, clock, lambda _: reply([1])) for name in ("a", "b")]
    trials = run_bench(arms, prompts(2), plan(num_warmups=3), clock, _quiet)
    assert [len(arm.calls) for arm in arms] == [5, 5]
    assert len(trials) == 4
    assert sum(trial.duration for trial in trials) == 4.0


def test_an_arm_that_keeps_state_between_prompts_is_found_out() -> None:
    clock = FakeClock()
    answers = iter([reply([1]), reply([1], first=50)])
    arms = [FakeArm("leaky", clock, lambda _: next(answers)), FakeArm("clean", clock, lambda _: reply([1]))]
    assert unsteady(run_bench(arms, prompts(1), plan(repeats=2), clock, _quiet)) == ["leaky"]


def test_progress_counts_every_call_once() -> None:
    clock, seen = FakeClock(), []
    arms = [FakeArm(name, clock, lambda _: reply([1])) for name in ("a", "b")]
    run_bench(arms, prompts(2), plan(1, 2), clock, lambda done, total: seen.append((done, total)))
    assert seen == [(n, 10) for n in range(1, 11)]


def test_no_prompts_give_no_trials() -> None:
    clock = FakeClock()
    arm = FakeArm("a", clock, lambda _: reply([1]))
    assert run_bench([arm], [], plan(num_warmups=2), clock, _quiet) == []


def test_prompts_run_in_batches_and_their_shares_add_up_to_the_time() -> None:
    clock = FakeClock()
    arms = [FakeArm(name, clock, lambda _: reply([1])) for name in ("a", "b")]
    trials = run_bench(arms, prompts(5), plan(num_warmups=3, batch_size=2), clock, _quiet)
    assert [[trial.prompt.id for trial in trials if trial.arm == name] for name in ("a", "b")] == [
        ["p0", "p1", "p2", "p3", "p4"]
    ] * 2
    assert [trial.duration for trial in trials if trial.arm == "a"] == [1.0] * 5
    assert [trial.share for trial in trials if trial.arm == "a"] == [0.5, 0.5, 0.5, 0.5, 1.0]
    assert sum(trial.share for trial in trials) == clock.now - 2 * 2, "three batches on each of two arms"
