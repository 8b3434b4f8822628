"""Run several arms over the same prompts, interleaved, by a clock that is handed in.

This file knows no model: an arm is anything with a name and a generate().
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from medusa_cli.bench.arms import Arm, Reply, StopRule
from medusa_cli.bench.prompt_set import BenchPrompt


@dataclass(frozen=True)
class Plan:
    """How a bench runs. Warm-up prompts run on every arm before the clock counts."""

    num_warmups: int
    repeats: int
    stop: StopRule


@dataclass(frozen=True)
class Trial:
    """One arm on one prompt, once: the reply as the stop rule ends it, and seconds from prompt to last token."""

    arm: str
    prompt: BenchPrompt
    repeat: int
    reply: Reply
    duration: float


def run_bench(
    arms: Sequence[Arm],
    prompts: Sequence[BenchPrompt],
    plan: Plan,
    clock: Callable[[], float],
    progress: Callable[[int, int], None],
) -> list[Trial]:
    """Every arm on every prompt, `plan.repeats` times.

    The order of the arms turns by one with each prompt and each repeat, so that each arm is first, second, … about
    equally often, and a machine that slows down slows all arms alike.
    progress   called with (calls done, calls in all), warm-ups included
    Raises DataError before any forward when a prompt leaves no room for a reply.
    """
    for prompt in prompts:
        plan.stop.budget(len(prompt.ids))
    warmups = [prompts[n % len(prompts)] for n in range(plan.num_warmups if prompts else 0)]
    total, done = (len(warmups) + plan.repeats * len(prompts)) * len(arms), 0
    for prompt in warmups:
        for arm in arms:
            arm.generate(list(prompt.ids))
            progress(done := done + 1, total)
    trials = []
    for repeat in range(plan.repeats):
        for number, prompt in enumerate(prompts):
            for arm in _turned(arms, number + repeat):
                trials.append(_trial(arm, prompt, repeat, plan.stop, clock))
                progress(done := done + 1, total)
    return trials


def _turned(arms: Sequence[Arm], by: int) -> list[Arm]:
    """The arms in the same circle, begun `by` places later."""
    start = by % len(arms)
    return [*arms[start:], *arms[:start]]


def _trial(arm: Arm, prompt: BenchPrompt, repeat: int, stop: StopRule, clock: Callable[[], float]) -> Trial:
    """One timed call."""
    ids = list(prompt.ids)
    began = clock()
    reply = arm.generate(ids)
    duration = clock() - began
    return Trial(arm.name, prompt, repeat, stop.clip(reply, len(prompt.ids)), duration)


def unsteady(trials: Sequence[Trial]) -> list[str]:
    """Names of arms that wrote different ids for the same prompt in different repeats, sorted."""
    first: dict[tuple[str, str], list[int]] = {}
    found = set()
    for trial in trials:
        ids = list(trial.reply.token_ids)
        if first.setdefault((trial.arm, trial.prompt.id), ids) != ids:
            found.add(trial.arm)
    return sorted(found)
