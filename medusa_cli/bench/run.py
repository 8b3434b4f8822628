"""Run several arms over the same prompts, interleaved, by a clock that is handed in.

This file knows no model: an arm is anything with a name and a generate().
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from medusa_cli.bench.baselines import Arm, Reply, StopRule
from medusa_cli.bench.prompt_set import BenchPrompt


@dataclass(frozen=True)
class Plan:
    """How a bench runs. Warm-up prompts run on every arm before the clock counts; `batch_size` run at once."""

    num_warmups: int
    repeats: int
    stop: StopRule
    batch_size: int = 1


@dataclass(frozen=True)
class Trial:
    """One arm on one prompt, once: the reply as the stop rule ends it.

    duration   seconds until the reply and all written beside it were there
    share      the part of these seconds that the reply accounts for: shares add up to the time that went by
    """

    arm: str
    prompt: BenchPrompt
    repeat: int
    reply: Reply
    duration: float
    share: float


class Memory(Protocol):
    """Batches that an earlier run measured, and where those of this one go."""

    def held(self, repeat: int, batch: int) -> list[Trial] | None:
        """What every arm wrote for this batch; None when it isn't there yet."""

    def keep(self, repeat: int, batch: int, trials: Sequence[Trial]) -> None:
        """Add a batch that every arm has written."""


def run_bench(
    arms: Sequence[Arm],
    prompts: Sequence[BenchPrompt],
    plan: Plan,
    clock: Callable[[], float],
    progress: Callable[[int, int], None],
    memory: Memory | None = None,
) -> list[Trial]:
    """Every arm on every prompt, `plan.repeats` times.

    The order of the arms turns by one with each batch and each repeat, so that each arm is first, second, … about
    equally often, and a machine that slows down slows all arms alike.
    progress   called with (replies done, replies in all), warm-ups included
    memory     its batches aren't run again, and where all are there nothing is; without one, nothing is kept
    Raises DataError before any forward when a prompt leaves no room for a reply.
    """
    for prompt in prompts:
        plan.stop.budget(len(prompt.ids))
    batches = _batches(prompts, plan.batch_size)
    places = [(repeat, number) for repeat in range(plan.repeats) for number in range(len(batches))]
    held = {place: trials for place in places if (trials := memory.held(*place) if memory else None)}
    warmups = [prompts[n % len(prompts)] for n in range(plan.num_warmups if len(held) < len(places) else 0)]
    total = (len(warmups) + plan.repeats * len(prompts)) * len(arms)
    done = sum(map(len, held.values()))
    for batch in _batches(warmups, plan.batch_size):
        for arm in arms:
            arm.generate([list(prompt.ids) for prompt in batch])
            progress(done := done + len(batch), total)
    for repeat, number in places:
        if (repeat, number) in held:
            continue
        trials = []
        for arm in _turned(arms, number + repeat):
            trials += _trials(arm, batches[number], repeat, plan.stop, clock)
            progress(done := done + len(batches[number]), total)
        if memory:
            memory.keep(repeat, number, trials)
        held[repeat, number] = trials
    return [trial for place in places for trial in held[place]]


def _batches(prompts: Sequence[BenchPrompt], size: int) -> list[Sequence[BenchPrompt]]:
    """The prompts in their order, `size` at once."""
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]


def _turned(arms: Sequence[Arm], by: int) -> list[Arm]:
    """The arms in the same circle, begun `by` places later."""
    start = by % len(arms)
    return [*arms[start:], *arms[:start]]


def _trials(
    arm: Arm, batch: Sequence[BenchPrompt], repeat: int, stop: StopRule, clock: Callable[[], float]
) -> list[Trial]:
    """One timed call."""
    ids = [list(prompt.ids) for prompt in batch]
    began = clock()
    replies = arm.generate(ids)
    duration = clock() - began
    return [
        Trial(arm.name, prompt, repeat, stop.clip(reply, len(prompt.ids)), duration, duration / len(batch))
        for prompt, reply in zip(batch, replies, strict=True)
    ]


def unsteady(trials: Sequence[Trial]) -> list[str]:
    """Names of arms that wrote different ids for the same prompt in different repeats, sorted."""
    first: dict[tuple[str, str], list[int]] = {}
    found = set()
    for trial in trials:
        ids = list(trial.reply.token_ids)
        if first.setdefault((trial.arm, trial.prompt.id), ids) != ids:
            found.add(trial.arm)
    return sorted(found)
