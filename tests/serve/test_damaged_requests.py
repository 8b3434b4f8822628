"""Damaged requests: a few of those that tests/fuzz/requests.py sends by the thousand."""

import json
from typing import Any

import pytest

from tests.fuzz.requests import run
from tests.serve.conftest import Served
from tests.serve.test_api import CHAT, GO, HI, WORDS


def test_damaged_requests_are_answered_or_refused_in_words() -> None:
    counts, faults = run(300, seed=7)
    assert not faults
    assert counts["200"] > 20
    assert counts["400"] > 100


@pytest.mark.parametrize(
    ("path", "document"),
    [
        (WORDS, GO | {"prompt": [5, 10**400]}),
        (WORDS, GO | {"prompt": [5, 2**63]}),
        (CHAT, HI | {"model": "\ud800"}),
        (CHAT, HI | {"\ud800": 1}),
        (CHAT, HI | {"logit_bias": {"\ud800": 1}}),
        (CHAT, HI | {"model": "x" * 100_000}),
    ],
    ids=range(6),
)
def test_what_can_not_be_sent_back_is_refused_in_words(served: Served, path: str, document: dict[str, Any]) -> None:
    with served.client() as client:
        answer = client.post(path, content=json.dumps(document))
    assert answer.status_code in (400, 404)
    assert 0 < len(answer.json()["error"]["message"]) <= 1000
