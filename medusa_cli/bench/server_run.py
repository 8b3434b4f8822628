"""Run of a bench against servers: every load on every arm, in turns, so that all see the same machine."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from medusa_cli.bench.prompt_set import Question
from medusa_cli.bench.server_client import Heard, Load, ServerArm, run_load
from medusa_cli.bench.server_report import Measured

TURNS = 4  # parts that the prompts of a load are asked in


@dataclass(frozen=True)
class ServerPlan:
    """What is asked of each arm.

    warmups   prompts that are asked before the clock counts
    """

    questions: Sequence[Question]
    loads: Sequence[Load]
    max_tokens: int
    warmups: int
    seed: int = 0


def run_servers(arms: Sequence[ServerArm], plan: ServerPlan, tell: Callable[[], None]) -> list[Measured]:
    """What was heard under each load. `tell`: called after each request."""
    for arm in arms:
        _turn(arm, plan.questions[: plan.warmups], Load(1), plan, tell)
    return [_measured(arms, load, plan, tell) for load in plan.loads]


def _measured(arms: Sequence[ServerArm], load: Load, plan: ServerPlan, tell: Callable[[], None]) -> Measured:
    heard, seconds = list[Heard](), dict.fromkeys((arm.name for arm in arms), 0.0)
    # fewer prompts than clients would leave some of these without work
    turns = max(1, min(TURNS, len(plan.questions) // (load.clients or 1)))
    for number in range(turns):
        part = plan.questions[number::turns]
        # who begins changes from turn to turn: what a machine does then is nobody's
        for place in range(len(arms)):
            arm = arms[(place + number) % len(arms)]
            began = time.perf_counter()
            heard += _turn(arm, part, load, plan, tell)
            seconds[arm.name] += time.perf_counter() - began
    return Measured(load, heard, seconds)


def _turn(
    arm: ServerArm, questions: Sequence[Question], load: Load, plan: ServerPlan, tell: Callable[[], None]
) -> list[Heard]:
    return asyncio.run(run_load(arm, questions, load, plan.max_tokens, plan.seed, tell))
