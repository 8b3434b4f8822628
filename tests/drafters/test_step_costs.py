"""What steps cost: as measured beforehand, between the sizes measured, and as seen since."""

import pytest

from medusa_cli.drafters.step_costs import Pace

FIRST = {1: 1.0, 2: 1.2, 4: 2.0}


def test_sizes_between_those_measured_lie_on_a_line() -> None:
    pace = Pace(FIRST)
    assert [pace.seconds(nodes) for nodes in (1, 2, 3, 4, 6)] == pytest.approx([1.0, 1.2, 1.6, 2.0, 2.8])
    assert Pace({1: 1.0}).seconds(9) == 1.0


def test_a_busy_machine_makes_every_size_dearer() -> None:
    pace = Pace(FIRST)
    for _ in range(10):
        pace.saw(2, 2.4, 1.0, guesses=True)
    assert pace.seconds(2) == pytest.approx(2.4)
    assert pace.seconds(4) == pytest.approx(4.0)


def test_a_size_that_was_seen_has_a_cost_of_its_own_and_the_next_ones_lean_on_it() -> None:
    pace = Pace({**FIRST, 8: 4.0})
    for _ in range(10):
        pace.saw(1, 1.0, 1.0, guesses=False)
        pace.saw(4, 0.5 * 2.0, 1.0, guesses=True)
    assert pace.seconds(1) == pytest.approx(1.0)
    assert pace.seconds(4) == pytest.approx(1.0)
    assert pace.seconds(8) == pytest.approx(2.0)


def test_what_is_dear_is_believed_at_the_second_step_and_what_is_cheap_at_the_first() -> None:
    pace = Pace(FIRST)
    pace.saw(1, 1.0, 1.0, guesses=False)
    pace.saw(4, 0.2, 1.0, guesses=True)
    assert pace.seconds(4) == pytest.approx(0.2)
    pace.saw(2, 12.0, 1.0, guesses=True)
    assert pace.seconds(2) < 1.3
    pace.saw(2, 12.0, 1.0, guesses=True)
    assert pace.seconds(2) == pytest.approx(12.0)


@pytest.mark.parametrize("before", [0, 1, 5, 50])
def test_an_interruption_says_little(before: int) -> None:
    pace = Pace(FIRST)
    for _ in range(before):
        pace.saw(1, 1.0, 1.0, guesses=False)
    pace.saw(1, 1000.0, 1.0, guesses=False)
    assert pace.seconds(1) == pytest.approx(1.0)
    for _ in range(10):
        pace.saw(1, 1.0, 1.0, guesses=False)
    assert pace.tokens_a_second > 0.8


def test_tokens_a_second_follow_what_came_and_how_busy_the_machine_is() -> None:
    pace = Pace(FIRST)
    assert pace.tokens_a_second == 1.0
    for _ in range(200):
        pace.saw(4, 2.0, 3.0, guesses=True)
    assert pace.tokens_a_second == pytest.approx(1.5, rel=0.01)
    for _ in range(6):
        pace.saw(4, 20.0, 3.0, guesses=True)
    assert pace.seconds(1) == pytest.approx(10.0, rel=0.1)
    assert pace.tokens_a_second == pytest.approx(0.15, rel=0.15), "ten times as busy, and known in six steps"


def test_what_earlier_runs_saw_confirms_the_table() -> None:
    assert Pace(FIRST).most == 2
    pace = Pace(FIRST, {1: 1.1, 4: 3.0})
    assert pace.most is None
    assert pace.seconds(4) == pytest.approx(3.0)
