"""The purse: what a text may lose, what trials may, and when a plain step must say what these cost."""

import pytest

from medusa_cli.drafters.purse import FIRST_STEPS, LEARNING, TEXT_AT_FIRST, Purse
from medusa_cli.drafters.step_costs import Lap, Pace

COSTS = {1: 1.0, 2: 1.2, 4: 1.6}


def learnt(first: float = 1.0) -> Purse:
    """One that has seen its first steps; the first of all took `first` seconds."""
    purse = Purse(Pace(COSTS, COSTS))
    for number in range(LEARNING + 1):
        plain(purse, 1.0 if number else first)
    return purse


def plain(purse: Purse, seconds: float = 1.0, tokens: float = 1.0) -> None:
    purse.saw(1, 1, Lap(seconds, tokens), guesses=False, trial=False)


def guess(purse: Purse, seconds: float = 1.6, tokens: float = 1.0, trial: bool = False) -> None:
    purse.saw(4, 1, Lap(seconds, tokens), guesses=True, trial=trial)


def steps_until_it_stops(purse: Purse, trial: bool) -> int:
    steps = 0
    while purse.allows(0.0, 1, 4, trial=trial):
        guess(purse, trial=trial)
        plain(purse)
        steps += 1
    return steps


def test_a_text_loses_a_few_plain_steps_at_most_and_the_next_may_again() -> None:
    purse = learnt()
    first = steps_until_it_stops(purse, trial=False)
    assert 0 < first * 0.6 < TEXT_AT_FIRST
    purse.begin(alone=True)
    assert steps_until_it_stops(purse, trial=False) == first


def test_trials_are_saved_for_over_all_texts() -> None:
    purse, steps = learnt(), []
    for _ in range(4):
        steps.append(steps_until_it_stops(purse, trial=True))
        purse.begin(alone=True)
    assert steps[0] > 1
    assert steps[-1] < steps[0], "what earlier texts lost on trials is not forgotten"


def test_a_text_that_begins_beside_others_owes_what_they_lost_and_has_not_what_they_won() -> None:
    purse = learnt()
    steps_until_it_stops(purse, trial=False)
    purse.begin(alone=False)
    assert not purse.allows(0.0, 1, 4, trial=False)
    won = learnt()
    for _ in range(20):
        guess(won, tokens=4.0)
    assert won.lost < -20
    won.begin(alone=False)
    assert won.lost == 0.0


def test_what_guesses_won_in_a_text_they_may_lose_in_it() -> None:
    poor, rich = learnt(), learnt()
    for _ in range(5):
        guess(rich, tokens=3.0)
    assert steps_until_it_stops(rich, trial=False) > steps_until_it_stops(poor, trial=False) + 5


def test_a_step_that_takes_oddly_long_is_followed_by_a_plain_one_which_says_whose_fault_it_was() -> None:
    for takes, forgiven in ((1.0, False), (5.0, True)):
        purse = learnt()
        while purse.must_look(1):
            plain(purse)
        before = purse.lost
        guess(purse, seconds=8.0, tokens=1.0)
        assert purse.must_look(1)
        plain(purse, takes)
        assert (purse.lost - before < 4.0) is forgiven


def test_a_step_whose_end_nobody_saw_is_charged_as_if_it_had_brought_nothing() -> None:
    purse = learnt()
    before = purse.lost
    purse.missed(1, 1, 0.0, trial=False)
    assert purse.lost == before
    purse.missed(4, 1, 0.5, trial=False)
    assert purse.lost == pytest.approx(before + 0.5 + 0.6)


def test_sizes_whose_first_step_will_be_slow_wait_until_all_texts_have_saved_for_it() -> None:
    assert learnt().allows(0.0, 1, 4, trial=False)
    purse = learnt(first=11.0)
    assert not purse.allows(0.0, 1, 4, trial=False)
    for _ in range(int(16.0 / FIRST_STEPS) + 1):
        plain(purse)
    assert purse.allows(0.0, 1, 4, trial=False)
    guess(purse, seconds=17.6)
    purse.begin(alone=True)
    assert not purse.allows(0.0, 1, 2, trial=False), "and the next size too"
