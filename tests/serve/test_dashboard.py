"""The dashboard: what it asks for is there, and a real Prometheus that scraped a real server answers each query."""

import json
import math
import re
import time
from pathlib import Path

import pytest

from medusa_cli.serve.pools import PoolSettings
from tests.prometheus import DASHBOARD, PROGRAM, prometheus, queries
from tests.serve.conftest import guesses, serving, target
from tests.serve.test_api import GO, WORDS
from tests.tiny_models import prompt_of
from tests.tools.make_dashboard import dashboard

LONG = prompt_of(70, 3)


def pooled() -> object:
    model, drafter, chosen = target(), guesses(), PoolSettings.of("memory:1GB")
    assert chosen is not None
    return serving(target=model, drafter=drafter, prefixes=chosen.open(model, drafter))


def test_the_file_is_what_the_list_of_panels_makes() -> None:
    assert json.loads(DASHBOARD.read_text(encoding="utf-8")) == dashboard()


def test_every_metric_that_it_asks_for_is_one_that_the_server_has() -> None:
    with pooled() as served:  # type: ignore[attr-defined]
        served.post(WORDS, GO | {"prompt": LONG, "max_tokens": 40, "ignore_eos": True})
        told = served.client().get("/metrics").text
    there = set(re.findall(r"^([\w:]+)(?:\{| )", told, re.MULTILINE))
    asked = {name for *_, query in queries() for name in re.findall(r"(?:medusa:|process_)\w+", query)}
    assert len(asked) > 20
    assert asked <= there


@pytest.mark.skipif(PROGRAM is None, reason="prometheus is not on the path")
def test_a_real_prometheus_answers_every_query(tmp_path: Path) -> None:
    with pooled() as served, prometheus(tmp_path, served.url) as found:  # type: ignore[attr-defined]
        found.wait_for("medusa:num_requests_running")
        for _ in range(6):  # rates need figures that grow from scrape to scrape
            for number in range(4):
                served.post(WORDS, GO | {"prompt": [*LONG, 5 + number], "max_tokens": 12, "ignore_eos": True})
            time.sleep(0.6)
        found.wait_for("rate(medusa:e2e_request_latency_seconds_count[1m]) > 0")
        for title, legend, query in queries():
            result = found.ask("query", query=query)["result"]
            assert result, f"{title} ({legend}) shows nothing: {query}"
            values = [float(each["value"][1]) for each in result]
            assert not any(map(math.isnan, values)), f"{title} ({legend}): {values}"
