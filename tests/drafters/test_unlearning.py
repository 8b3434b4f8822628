"""Law: whatever is remembered of step costs, a hundred steps later texts are written as fast as with the truth.

The machine is simulated: it knows what steps take, guesses come true as often as they say, and its clock is its own.
"""

import random
from collections.abc import Callable

import pytest

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.decode.loop import Parts, collect
from medusa_cli.decode.rows import Limits
from medusa_cli.drafters.mixed import Budget, GatheredDrafter
from medusa_cli.drafters.purse import LEARNING
from medusa_cli.drafters.step_costs import Lap, Pace
from medusa_cli.drafters.suffix import Suffixes
from medusa_cli.trees.build import never_falling
from tests.simulated import COMPILED, MACHINES, Costs
from tests.tiny_models import NUM_NEW, known, target_of, tiny_model

WRONG: dict[str, Callable[[Costs], dict[int, float]]] = {
    "all ten times too dear": lambda true: {n: 10 * took for n, took in true.items()},
    "all ten times too cheap": lambda true: {n: took / 10 for n, took in true.items()},
    "guesses ten times too dear": lambda true: {n: took * (10 if n > 1 else 1) for n, took in true.items()},
    "guesses ten times too cheap": lambda true: {n: took / (10 if n > 1 else 1) for n, took in true.items()},
    "large sizes ten times too dear": lambda true: {n: took * (10 if n > 3 else 1) for n, took in true.items()},
    "large sizes ten times too cheap": lambda true: {n: took / (10 if n > 3 else 1) for n, took in true.items()},
    "plain steps ten times too dear": lambda true: {n: took * (10 if n == 1 else 1) for n, took in true.items()},
    "plain steps ten times too cheap": lambda true: {n: took / (10 if n == 1 else 1) for n, took in true.items()},
    "measured with waits of 400 ms": lambda true: {n: took + 400 for n, took in true.items()},
    "some measured with waits": lambda true: {n: took + (400 if n in (2, 4, 8) else 0) for n, took in true.items()},
    "one size only": lambda true: {1: true[1]},
}


def kept(table: dict[int, float]) -> dict[int, float]:
    """The curve that is made of what was measured."""
    return dict(zip(sorted(table), never_falling([table[count] for count in sorted(table)]), strict=True))


class Machine:
    """Writes texts, a step at a time, with a budget that was told `first`."""

    def __init__(self, true: Costs, first: Costs, laps: Costs | None = None, seed: int = 0) -> None:
        self.true = Pace(true)
        self.budget = Budget(16, Pace(first, laps))
        self.rng = random.Random(seed)
        self.time = self.tokens = 0.0

    def run(self, steps: int) -> float:
        """Tokens a second over so many steps."""
        self.time = self.tokens = 0.0
        self.budget.purse.begin(alone=True)
        for _ in range(steps):
            sure = self.rng.uniform(0.3, 0.9)
            chances = [sure**depth for depth in range(1, 17)]
            kept = [self.rng.random() for _ in chances]
            is_plain = self.budget.is_plain(1)
            self.budget.floor(1)
            count = 0 if is_plain else self.budget.num_nodes([chances])
            tokens = 1.0 + sum(roll < chance for roll, chance in zip(kept[:count], chances[:count], strict=True))
            seconds = self.true.seconds(count + 1) * self.rng.uniform(0.97, 1.06)
            self.time += seconds
            self.tokens += tokens
            self.budget.saw(count + 1, 1, Lap(seconds, tokens))
        return self.tokens / self.time


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_table_is_unlearnt_within_a_hundred_steps(machine: str, wrong: str) -> None:
    true = MACHINES[machine]
    speeds = []
    for seed in range(2):
        misled, knowing = Machine(true, kept(WRONG[wrong](true)), seed=seed), Machine(true, true, seed=seed)
        misled.run(100)
        knowing.run(100)
        speeds.append(misled.run(200) / knowing.run(200))
    assert sum(speeds) / len(speeds) > 0.92, speeds


@pytest.mark.parametrize("wrong", WRONG)
def test_what_earlier_runs_saw_is_doubted_as_well(wrong: str) -> None:
    speeds = []
    for seed in range(2):
        misled = Machine(COMPILED, COMPILED, laps=WRONG[wrong](COMPILED), seed=seed)
        knowing = Machine(COMPILED, COMPILED, laps=COMPILED, seed=seed)
        misled.run(100)
        knowing.run(100)
        speeds.append(misled.run(200) / knowing.run(200))
    assert sum(speeds) / len(speeds) > 0.92, speeds


def test_a_machine_that_becomes_busy_and_quiet_again_is_followed() -> None:
    machine, knowing = Machine(COMPILED, COMPILED), Machine(COMPILED, COMPILED)
    machine.run(50)
    machine.true = Pace({n: 7 * took for n, took in COMPILED.items()})
    machine.run(50)
    machine.true = Pace(COMPILED)
    machine.run(50)
    knowing.run(150)
    assert machine.run(200) > 0.96 * knowing.run(200)


def counts_of(budget: Budget, steps: int, chances: list[float], costs: Costs) -> list[int]:
    """Guesses of each step, all of which come true."""
    counts = []
    for _ in range(steps):
        counts.append(0 if budget.is_plain(1) else budget.num_nodes([chances]))
        budget.saw(counts[-1] + 1, 1, Lap(Pace(costs).seconds(counts[-1] + 1), 1.0 + counts[-1]))
    return counts


def test_few_guesses_are_made_until_steps_confirm_the_table() -> None:
    flat = {1: 1.0, 32: 1.0}
    guessed = [count for count in counts_of(Budget(16, Pace(flat)), 24, [0.99] * 16, flat) if count]
    assert guessed[:2] == [2, 2]
    assert guessed == sorted(guessed)
    assert max(guessed) == 16


def test_a_table_that_an_earlier_run_confirmed_is_believed_at_once() -> None:
    flat = {1: 1.0, 32: 1.0}
    counts = counts_of(Budget(16, Pace(flat, {1: 1.0, 17: 1.0})), LEARNING + 1, [0.99] * 16, flat)
    assert counts == [0] * LEARNING + [16]


def test_guesses_that_are_called_too_dear_are_tried_now_and_then() -> None:
    dear = {1: 1.0, 2: 2.0, 32: 32.0}
    counts = counts_of(Budget(16, Pace(dear)), 300, [0.3], dear)
    tried = [step for step, count in enumerate(counts) if count]
    assert 3 <= len(tried) <= 14, "seldom, and soon at first"
    assert tried[0] < 8


@pytest.mark.parametrize("wrong", WRONG)
def test_the_text_is_the_plain_one_whatever_the_table_says(wrong: str) -> None:
    texts, target = known("llama"), target_of(tiny_model("llama"))
    ticks = iter(range(10**9))
    drafter = GatheredDrafter([Suffixes()], Budget(7, Pace(WRONG[wrong](COMPILED))), clock=lambda: float(next(ticks)))
    found = collect(Parts(target, drafter, Greedy()), texts.prompts, Limits(NUM_NEW), 2)
    assert [each.token_ids for each in found] == texts.wanted(3)
