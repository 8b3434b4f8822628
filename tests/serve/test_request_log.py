"""Log of requests: ids that go in and out, a line for each, and nothing in it that is nobody's business."""

import io
import json
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from medusa_cli.serve.policy import Policy, digest_of
from medusa_cli.serve.request_log import LineHandler, as_text, log_lines
from medusa_cli.serve.service import Service
from tests.serve.conftest import Served, serving
from tests.serve.test_api import CHAT, GO, HI, WORDS
from tests.serve.test_engine_thread import waits_for


class Lines(io.StringIO):
    """Where lines are written; each must be a JSON document."""

    def __init__(self, found: list[dict[str, Any]]) -> None:
        super().__init__()
        self._found = found

    def write(self, text: str) -> int:
        assert text.endswith("\n")
        assert text.count("\n") == 1
        self._found.append(json.loads(text))
        return len(text)


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    """What is logged, as JSON has it."""
    found: list[dict[str, Any]] = []
    with log_lines(LineHandler(Lines(found), lambda *_: None), logging.INFO):
        yield found


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


def test_a_bug_is_told_by_its_place_and_the_requests_id_and_never_in_its_own_words(
    served: Served, lines: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Service, wanted: Any, *rest: Any) -> None:
        raise ValueError(f"can't read {wanted.prompt}")

    monkeypatch.setattr(Service, "call", broken)
    answer = served.post(WORDS, GO, headers={"X-Request-Id": "abc"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "abc")
    assert answer.json()["error"]["type"] == "server_error"
    assert waits_for(lambda: len(lines) == 2)
    bug, request = lines
    assert (bug["id"], bug["error"], bug["level"]) == ("abc", "ValueError", "error")
    assert bug["at"][0].startswith("serve/test_request_log.py:")
    assert bug["at"][0].endswith(":broken")
    assert request["status"] == 500
    assert "w5" not in json.dumps(lines)


def test_a_key_that_is_sent_in_the_wrong_place_is_not_logged(lines: list[dict[str, Any]]) -> None:
    with serving(policy=Policy([digest_of("sesame-opens")])) as served, served.client() as client:
        answer = client.get("/v1/models/sesame-opens", headers={"X-Request-Id": "sesame-opens"})
        assert len(answer.headers["x-request-id"]) == 32
        assert waits_for(lambda: len(lines) == 1)
    assert lines[0]["path"] == "/v1/models/..."
    assert "sesame" not in json.dumps(lines)


@pytest.mark.parametrize(
    "name", ["uvicorn.error", "asyncio", "transformers.tokenization", "redis", "medusa_cli.serve.x"]
)
def test_what_libraries_report_is_a_line_too(lines: list[dict[str, Any]], name: str) -> None:
    logging.getLogger(name).error("two\nlines")
    assert [line["message"] for line in lines] == ["two\nlines"]
    assert as_text("two\nlines\x1b[0m", {}) == r"two\nlines\x1b[0m"


def test_warnings_are_lines_and_all_is_as_before_at_the_end() -> None:
    found: list[dict[str, Any]] = []
    root = logging.getLogger()
    before = list(root.handlers)
    with log_lines(LineHandler(Lines(found), lambda *_: None), logging.INFO), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning("old", UserWarning, "file.py", 3)
    assert "old" in found[0]["message"]
    assert root.handlers == before


def test_a_log_that_nobody_reads_any_more_costs_no_request(served: Served) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with log_lines(LineHandler(Gone(), lambda *_: None), logging.INFO):
        logging.getLogger("medusa_cli").error("nobody reads this")
        assert served.post(WORDS, GO).status_code == 200
