"""What steps cost: as measured beforehand, between the sizes measured, and as seen since."""

import pytest

from medusa_cli.drafters.pace import OUTLIER, Pace

FIRST = {1: 1.0, 2: 1.2, 4: 2.0}


def test_sizes_between_those_measured_lie_on_a_line() -> None:
    pace = Pace(FIRST)
    assert [pace.seconds(nodes) for nodes in (1, 2, 3, 4, 6)] == pytest.approx([1.0, 1.2, 1.6, 2.0, 2.8])
    assert Pace({1: 1.0}).seconds(9) == 1.0


def test_a_busy_machine_makes_every_size_dearer() -> None:
    pace = Pace(FIRST)
    for _ in range(100):
        pace.saw(2, 2.4, 1.0)
    assert pace.seconds(2) == pytest.approx(2.4, rel=0.01)
    assert pace.seconds(4) == pytest.approx(4.0, rel=0.01)


def test_a_size_that_was_seen_has_a_cost_of_its_own() -> None:
    pace = Pace(FIRST)
    for _ in range(100):
        pace.saw(4, 1.5, 1.0)
        pace.saw(1, 1.0, 1.0)
    assert pace.seconds(4) == pytest.approx(1.5, rel=0.01)
    assert pace.seconds(1) == pytest.approx(1.0, rel=0.01)


def test_an_interruption_says_little() -> None:
    pace = Pace(FIRST)
    pace.saw(1, 1000.0, 1.0)
    assert pace.seconds(1) <= 1.0 + 0.1 * OUTLIER
    assert pace.tokens_a_second > 0.9


def test_tokens_a_second_follow_what_came() -> None:
    pace = Pace(FIRST)
    assert pace.tokens_a_second == 1.0
    for _ in range(500):
        pace.saw(4, 2.0, 3.0)
    assert pace.tokens_a_second == pytest.approx(1.5, rel=0.01)
