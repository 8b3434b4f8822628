"""Pieces of work are timed in turn; the least of their rounds counts, the spread says whether they were left alone."""

from collections.abc import Callable

import pytest

from medusa_cli.util.busy import Contention, Meter
from medusa_cli.util.timing import Times, interleaved, was_disturbed, widest_spread


class Work:
    """A clock that only work moves, and an order in which it came."""

    def __init__(self) -> None:
        self.time = 0.0
        self.order: list[str] = []

    def of(self, name: str, seconds: list[float]) -> Callable[[], None]:
        left = iter(seconds)

        def run() -> None:
            self.order.append(name)
            self.time += next(left)

        return run


def test_rounds_are_interleaved_and_the_first_warms_up() -> None:
    work = Work()
    times = interleaved(
        {"a": work.of("a", [9.0, 1.0, 2.0, 1.5]), "b": work.of("b", [9.0, 4.0, 4.0, 8.0])}, lambda: work.time, rounds=3
    )
    assert work.order == ["a", "b"] * 4
    assert times["a"].seconds == (1.0, 2.0, 1.5)
    assert (times["a"].least, times["a"].median, times["a"].spread) == (1.0, 1.5, pytest.approx(0.5))
    assert times["b"].least == 4.0
    assert widest_spread(times) == pytest.approx(0.5)


def test_patience_ends_after_a_round_and_one_is_always_had() -> None:
    work = Work()
    times = interleaved({"a": work.of("a", [5.0] * 9)}, lambda: work.time, rounds=8, patience_s=1.0)
    assert times == {"a": Times((5.0,))}
    work = Work()
    times = interleaved({"a": work.of("a", [5.0] * 9)}, lambda: work.time, rounds=8, patience_s=16.0)
    assert len(times["a"].seconds) == 3


def test_half_of_the_rounds_may_be_disturbed_and_the_least_is_still_that_of_the_work() -> None:
    times = Times((969.0, 23.0, 950.0, 24.0, 23.5))
    assert times.least == 23.0
    assert times.spread < 0.1
    assert Times((969.0, 23.0, 950.0, 24.0, 970.0)).spread > 10, "more were: that is told"


@pytest.mark.parametrize(("spread", "waiting", "disturbed"), [(0.2, 0.0, False), (0.3, 0.0, True), (0.2, 1.4, True)])
def test_rounds_that_differ_and_threads_that_waited_are_a_disturbance(
    monkeypatch: pytest.MonkeyPatch, spread: float, waiting: float, disturbed: bool
) -> None:
    monkeypatch.setattr(Meter, "read", lambda self: Contention(waiting, 0.0, 1.0, 2))
    assert was_disturbed(spread, Meter()) is disturbed
