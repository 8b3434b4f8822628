"""Damaged requests: a few of those that tests/fuzz/requests.py sends by the thousand."""

from tests.fuzz.requests import run


def test_damaged_requests_are_answered_or_refused_in_words() -> None:
    counts, faults = run(300, seed=7)
    assert not faults
    assert counts["200"] > 20
    assert counts["400"] > 100
