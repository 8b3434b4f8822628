"""Log of requests: ids that go in and out, a line for each, and nothing in it that is nobody's business."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from medusa_cli.serve.policy import Policy, digest_of
from medusa_cli.serve.request_log import NAME_OF_LOG, LineHandler, as_text
from tests.serve.conftest import Served, serving
from tests.serve.test_api import CHAT, GO, HI, WORDS
from tests.serve.test_engine_thread import waits_for


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    """The records of requests, as JSON has them."""
    found: list[dict[str, Any]] = []

    class Lines(io.StringIO):
        def write(self, text: str) -> int:
            assert text.endswith("\n")
            assert text.count("\n") == 1
            found.append(json.loads(text))
            return len(text)

    logger = logging.getLogger(NAME_OF_LOG)
    handler, level = LineHandler(Lines(), lambda *_: None), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_a_request_is_a_line_with_its_figures(served: Served, lines: list[dict[str, Any]]) -> None:
    usage = served.post(WORDS, GO).json()["usage"]
    assert waits_for(lambda: len(lines) == 1)
    (line,) = lines
    assert (line["method"], line["path"], line["status"], line["client"]) == ("POST", WORDS, 200, "127.0.0.1")
    assert (line["prompt_tokens"], line["completion_tokens"]) == (3, usage["completion_tokens"])
    assert line["finish"] == ["length"]
    assert 0 <= line["queue_s"] <= line["first_s"] <= line["whole_s"]
    assert {"num_steps", "num_draft_tokens", "num_accepted_tokens", "cached_tokens", "time", "level"} <= set(line)


@pytest.mark.parametrize("stream", [True, False])
def test_an_id_is_taken_over_where_it_is_one_and_stands_on_every_reply(
    served: Served, lines: list[dict[str, Any]], stream: bool
) -> None:
    for path, document in ((WORDS, GO | {"stream": stream}), (WORDS, {"wrong": 1}), ("/nowhere", {})):
        answer = served.post(path, document, headers={"X-Request-Id": "abc-1.2:3"})
        assert answer.headers["x-request-id"] == "abc-1.2:3"
        fresh = served.post(path, document, headers={"X-Request-Id": 'x" y\t{}'}).headers["x-request-id"]
        assert len(fresh) == 32
    assert waits_for(lambda: len(lines) == 6)
    assert [line["id"] for line in lines[::2]] == ["abc-1.2:3"] * 3
    assert [line["status"] for line in lines[::2]] == [200, 400, 404]


def test_neither_keys_nor_prompts_nor_texts_are_logged(lines: list[dict[str, Any]]) -> None:
    with serving(policy=Policy([digest_of("sesame-opens")])) as served:
        for key, status in (("sesame-opens", 200), ("sesame-wrong", 401)):
            answer = served.post(CHAT, HI, headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == status
        served.post(CHAT, HI | {"model": "secret-model"}, headers={"Authorization": "Bearer sesame-opens"})
    assert len(lines) == 3
    told = json.dumps(lines)
    for secret in ("sesame", "w5", "Bearer", "secret-model", digest_of("sesame-opens").hex()):
        assert secret not in told
    assert lines[0]["client"] == f"key {digest_of('Bearer sesame-opens').hex()[:8]}"


def test_what_programs_ask_every_few_seconds_is_no_line(served: Served, lines: list[dict[str, Any]]) -> None:
    with served.client() as client:
        client.get("/health")
        client.get("/metrics")
        client.get("/v1/models")
    assert waits_for(lambda: len(lines) == 1)
    assert lines[0]["path"] == "/v1/models"


def test_a_client_cannot_write_lines_of_its_own(served: Served, lines: list[dict[str, Any]]) -> None:
    with served.client() as client:
        client.get("/a%0Ainjected%20status=200%1b[31m" + "x" * 500)
    assert waits_for(lambda: len(lines) == 1)
    fields = {name: value for name, value in lines[0].items() if name not in ("time", "level", "message")}
    line = as_text("request", fields)
    assert "\n" not in line
    assert "\x1b" not in line
    assert 'path="/a\\ninjected status=200' in line
    assert len(line) < 500


def test_a_client_that_left_is_told_as_such(served: Served, lines: list[dict[str, Any]]) -> None:
    with served.client() as client:
        document = GO | {"max_tokens": 60, "ignore_eos": True, "stream": True}
        with client.stream("POST", WORDS, json=document) as answer:
            next(answer.iter_lines())
    assert waits_for(lambda: len(lines) == 1)
    assert lines[0]["finish"] in (["abort"], ["length"])


def test_waiting_for_a_row_is_measured(served: Served) -> None:
    served.post(WORDS, GO | {"n": 8})
    told = served.client().get("/metrics").text
    assert 'medusa:request_queue_time_seconds_bucket{le="+Inf"}' in told
    assert 'medusa:build_info{device="cpu",drafter="suffix",dtype="float32",model="tiny",runner="eager"' in told
    assert "process_resident_memory_bytes" in told
