"""What a step costs by context, in a table and in words."""

import pytest

from medusa_cli.trees.contexts import ContextCost, as_bytes, growth, to_text

MIB = 2**20


def _cost(context: int, plain: float, tree: float, mib: int) -> ContextCost:
    return ContextCost(context, {1: plain, 9: tree}, mib * MIB)


COSTS = [_cost(128, 0.040, 0.050, 8), _cost(512, 0.043, 0.055, 32), _cost(2048, 0.055, 0.062, 128)]


def test_each_context_has_its_times_their_ratio_and_the_bytes_read() -> None:
    lines = to_text(COSTS).splitlines()
    assert " ".join(lines[1].split()) == "context 1 node, ms 9 nodes, ms ratio cache, MiB by bytes, ms"
    assert lines[2].split() == ["128", "40.00", "50.00", "1.25x", "8.0", "40.00"]
    assert lines[3].split() == ["512", "43.00", "55.00", "1.28x", "32.0", "43.00"]
    assert max(map(len, lines)) <= 110


def test_a_cost_that_grows_as_the_bytes_do_lies_on_the_line() -> None:
    assert as_bytes(COSTS, 1) == pytest.approx([0.040, 0.043, 0.055])
    assert as_bytes(COSTS, 9)[1] == pytest.approx(0.050 + 0.012 * 24 / 120)


def test_what_the_longest_context_adds_is_told_with_the_speed_it_is_read_at() -> None:
    assert growth(COSTS, 1).bytes_per_second == pytest.approx(120 * MIB / 0.015)
    text = to_text(COSTS)
    assert "1 node: 2048 tokens take 15.00 ms more than 128, and read 120.0 MiB more: 8.39 GB/s." in text
    assert "9 nodes: 2048 tokens take 12.00 ms more than 128, and read 120.0 MiB more: 10.5 GB/s." in text


def test_a_window_that_reads_no_more_has_no_speed_and_a_level_line() -> None:
    costs = [_cost(128, 0.040, 0.050, 8), _cost(512, 0.041, 0.049, 8)]
    assert as_bytes(costs, 1) == [0.040, 0.040]
    text = to_text(costs)
    assert "and read 0.0 MiB more." in text
    assert "GB/s" not in text


def test_one_context_alone_grows_nowhere() -> None:
    assert to_text(COSTS[:1]).splitlines()[-1].split()[0] == "128"
    assert "more than" not in to_text(COSTS[:1])
