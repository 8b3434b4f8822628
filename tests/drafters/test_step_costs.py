"""What steps cost: as measured beforehand, between the sizes measured, and as seen since."""

import pytest

from medusa_cli.drafters.step_costs import FADES, LATEST, LEAST, UNTRIED, Lap, Pace

FIRST = {1: 1.0, 2: 1.2, 4: 2.0}


def see(pace: Pace, nodes: int, seconds: float, tokens: float = 1.0) -> None:
    """A step of one row."""
    pace.saw(nodes, 1, Lap(seconds, tokens), guesses=nodes > 1)


def test_sizes_between_those_measured_lie_on_a_line() -> None:
    pace = Pace(FIRST)
    assert [pace.seconds(nodes) for nodes in (1, 2, 3, 4, 6)] == pytest.approx([1.0, 1.2, 1.6, 2.0, 2.8])
    assert Pace({1: 1.0}).seconds(9) == 1.0


def test_a_busy_machine_makes_every_size_dearer() -> None:
    pace = Pace(FIRST)
    see(pace, 1, 2.0)
    assert [pace.seconds(nodes) for nodes in (1, 2, 4)] == pytest.approx([2.0, 2.4, 4.0])


def test_steps_of_a_known_size_say_how_busy_the_machine_is_and_one_alone_says_nothing() -> None:
    pace = Pace(FIRST)
    for nodes in (1, 2, 1):
        see(pace, nodes, FIRST[nodes])
    for expected in (1.0, 1.0, 3.0):
        see(pace, 2, 3.6)
        assert pace.seconds(1) == pytest.approx(expected)


def test_a_size_has_a_cost_of_its_own_beside_a_plain_step_and_the_next_ones_lean_on_it() -> None:
    pace = Pace({**FIRST, 8: 4.0})
    for _ in range(10):
        see(pace, 4, 0.5 * 2.0)
        see(pace, 1, 1.0)
    assert pace.seconds(1) == pytest.approx(1.0)
    assert pace.seconds(4) == pytest.approx(1.0)
    assert pace.seconds(8) == pytest.approx(2.0)


def test_a_size_that_becomes_dear_is_not_taken_for_a_busy_machine() -> None:
    pace = Pace(FIRST)
    for took in (2.0, 2.0, 6.0, 6.0, 6.0):
        see(pace, 4, took)
        see(pace, 1, 1.0)
    assert pace.seconds(1) == pytest.approx(1.0)
    assert pace.seconds(4) == pytest.approx(6.0)


def test_what_is_dear_is_believed_at_the_second_step_and_what_is_cheap_at_the_first() -> None:
    pace = Pace(FIRST)
    see(pace, 4, 0.2)
    see(pace, 1, 1.0)
    assert pace.seconds(4) == pytest.approx(0.2)
    before = pace.seconds(2)
    see(pace, 2, 12.0)
    see(pace, 1, 1.0)
    assert pace.seconds(2) == pytest.approx(before)
    see(pace, 2, 12.0)
    see(pace, 1, 1.0)
    assert pace.seconds(2) == pytest.approx(12.0)


def test_what_is_not_tried_is_believed_less_and_less_to_be_dear() -> None:
    pace = Pace(FIRST)
    for _ in range(LATEST):
        see(pace, 4, 20.0)
        see(pace, 1, 1.0)
    assert pace.seconds(4) == pytest.approx(20.0)
    for _ in range(UNTRIED):
        see(pace, 1, 1.0)
    assert pace.seconds(4) == pytest.approx(20.0 * FADES)
    for _ in range(20 * UNTRIED):
        see(pace, 1, 1.0)
    assert pace.seconds(4) == pytest.approx(20.0 * LEAST)
    see(pace, 4, 20.0)
    assert pace.seconds(4) == pytest.approx(20.0)


def test_more_nodes_never_cost_more_than_as_many_steps() -> None:
    assert Pace({1: 1.0, 2: 50.0}).seconds(2) == 2.0
    assert Pace(FIRST, {1: 1.0, 4: 40.0}).seconds(4) == pytest.approx(4.0)


def test_what_guesses_took_is_no_cost_of_their_nodes() -> None:
    pace = Pace(FIRST)
    for nodes, asked in ((4, 7.0), (1, 0.0)) * 3:
        pace.saw(nodes, 1, Lap(FIRST[nodes] + asked, 1.0, asked=asked), guesses=True)
    assert pace.seconds(4) == pytest.approx(2.0)
    assert pace.tokens_a_second == pytest.approx(6 / (3 * 10.0))


@pytest.mark.parametrize("before", [1, 5, 50])
def test_an_interruption_says_little(before: int) -> None:
    pace = Pace(FIRST)
    for _ in range(before):
        see(pace, 1, 1.0)
    see(pace, 2, 1000.0)
    see(pace, 1, 1.0)
    assert pace.seconds(1) == pytest.approx(1.0)
    assert pace.seconds(2) == pytest.approx(1.2)
    for _ in range(10):
        see(pace, 1, 1.0)
    assert pace.tokens_a_second > 0.8


def test_tokens_a_second_follow_what_came_and_how_busy_the_machine_is() -> None:
    pace = Pace(FIRST)
    assert pace.tokens_a_second == 1.0
    see(pace, 4, 2.0, 3.0)
    see(pace, 1, 1.0)
    for _ in range(200):
        see(pace, 4, 2.0, 3.0)
    assert pace.tokens_a_second == pytest.approx(1.5, rel=0.02)
    for _ in range(3):
        see(pace, 4, 20.0, 3.0)
    assert pace.seconds(1) == pytest.approx(10.0, rel=0.1)
    assert pace.tokens_a_second == pytest.approx(0.15, rel=0.15), "ten times as busy, and known in three steps"


def test_what_earlier_runs_saw_confirms_the_table() -> None:
    assert Pace(FIRST).most == 2
    pace = Pace(FIRST, {1: 1.0, 4: 3.0})
    assert pace.most is None
    assert pace.seconds(4) == pytest.approx(3.0)
