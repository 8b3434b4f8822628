"""`medusa bench --url` against a real server over a tiny model, and against servers that are none."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from medusa_cli.serve.policy import Policy, digest_of
from tests.chat_server import Says, chat_server, completion
from tests.cli.harness import in_two_lines, run_here
from tests.serve.conftest import Served, serving


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(max_waiting=64) as found:
        yield found


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    rows = [{"id": str(number), "category": "a", "turns": [f"w{number + 4} w{number + 9}"]} for number in range(9)]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def bench(url: str, prompts: Path, *more: str) -> Any:
    return run_here("bench", "--url", url, "--prompts", str(prompts), "-n", "12", *more)


def test_a_server_is_measured_with_and_without_guesses(served: Served, prompts: Path) -> None:
    done = bench(served.url, prompts, "--concurrency", "1,3", "--json", "--require-identical")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert [level["concurrency"] for level in report["levels"]] == [1, 3]
    for level in report["levels"]:
        guessed, plain = level["arms"]["server"], level["arms"]["no-speculation"]
        assert guessed["requests"] == plain["requests"] == 9
        assert guessed["total_output_tokens"] == plain["total_output_tokens"] > 9
        assert level["identical"]["no-speculation"] == {"same": 9, "of": 9, "differ": []}
        assert plain["tokens_per_step"] == 1.0 <= guessed["tokens_per_step"]
        for arm in (guessed, plain):
            assert 0 < arm["ttft_ms"]["p50"] <= arm["e2e_ms"]["p50"] <= arm["e2e_ms"]["p99"]
            assert arm["failed"] == {}
    assert "no-speculation" in report["verdict"]


def test_requests_may_come_at_a_rate_and_two_servers_side_by_side(
    served: Served, prompts: Path, tmp_path: Path
) -> None:
    with serving() as other:
        picture = tmp_path / "a.png"
        done = bench(served.url, prompts, "--request-rate", "200", "--compare", other.url, "--plot", str(picture))
    assert done.code == 0, done.err
    assert "9 of 9" in done.out
    assert "200/s" in done.out
    assert picture.stat().st_size > 10_000


def test_a_key_goes_to_its_server_and_no_other(served: Served, prompts: Path) -> None:
    with serving(policy=Policy([digest_of("sesame")])) as locked:
        assert bench(locked.url, prompts, "--api-key", "sesame", "--concurrency", "2").code == 0
        done = bench(locked.url, prompts)
        assert in_two_lines(done.err)
        assert "401" in done.err
        done = bench(served.url, prompts, "--api-key", "sesame", "--compare", locked.url)
        assert "401" in done.err


def stream(text: str) -> Says:
    """A text as another server streams it: all at once."""
    chunks = [
        {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"completion_tokens": 3}},
    ]
    lines = [f"data: {json.dumps(chunk)}" for chunk in chunks] + ["data: [DONE]"]
    return Says("\n\n".join(lines).encode(), headers={"Content-Type": "text/event-stream"})


def test_a_server_that_refuses_the_field_is_told(prompts: Path) -> None:
    def answer(body: dict[str, Any]) -> Says:
        if "speculate" in body:
            return Says({"error": {"message": "unknown field speculate"}}, 400)
        return stream("hi")

    with chat_server(answer) as plain:
        done = bench(plain.url, prompts, "--concurrency", "2")
        assert done.code == 1
        assert in_two_lines(done.err)
        assert "no-speculation answered no request: no-speculation: 400: unknown field speculate" in done.err
        with chat_server(lambda _: stream("ho")) as other:
            done = bench(plain.url, prompts, "--concurrency", "2", "--compare", other.url, "--require-identical")
    assert done.code == 3
    assert "0 of 9" in done.out
    assert "9 texts differ" in done.err


@pytest.mark.parametrize(
    "says",
    [
        Says(b"rubbish"),
        Says(b"data: rubbish\n\ndata: [DONE]\n\n"),
        Says(b'data: {"error": {"message": "broken"}}\n\n'),
        completion("whole and no stream"),
        Says(b"", 500),
    ],
)
def test_answers_that_are_no_stream_are_told(says: Says, prompts: Path) -> None:
    with chat_server(lambda _: says) as strange:
        done = bench(strange.url, prompts, "--concurrency", "2")
    assert done.code == 1
    assert in_two_lines(done.err)
    assert "server answered no request" in done.err


def test_a_server_that_goes_away_in_the_middle_leaves_what_was_measured(prompts: Path) -> None:
    left = iter(range(7))

    def answer(_: dict[str, Any]) -> Says:
        return stream("hi") if next(left, None) is not None else Says(b"", headers={"Content-Length": "100"})

    with chat_server(answer) as fading, chat_server(lambda _: stream("hi")) as other:
        done = bench(fading.url, prompts, "--concurrency", "1", "--compare", other.url, "--json")
    assert done.code == 1
    assert done.document["levels"][0]["arms"]["server"]["failed"]["0"] > 0
    assert done.document["levels"][0]["arms"]["server"]["total_output_tokens"] > 0
    assert "were not answered at all" in done.err


def test_where_nothing_listens_is_one_error_and_one_hint(prompts: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        done = bench(f"http://127.0.0.1:{free.getsockname()[1]}", prompts)
    assert done.code == 1
    assert in_two_lines(done.err)
    assert "nothing answers" in done.err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--url", "localhost:8000"], "write http://host:port"),
        (["--url", "http://h", "--drafter", "suffix"], "--drafter is about a model that is loaded here"),
        (["--url", "http://h", "-m", "tiny"], "--model is about a model"),
        (["--url", "http://h", "--tree-size", "4"], "--tree-size is about a model"),
        (["--url", "http://h", "--batch-size", "4"], "--batch-size is about a model"),
        (["--url", "http://h", "--concurrency", "0"], "write numbers of clients"),
        (["--url", "http://h", "--concurrency", "x"], "write numbers of clients"),
        (["--concurrency", "4"], "--concurrency is about a server: name it with --url"),
        (["--served-model", "a"], "--served-model is about a server"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags: list[str], told: str) -> None:
    done = run_here("bench", *flags)
    assert done.code == 2
    assert told in " ".join(done.err.split())


def test_an_arm_that_is_no_server_is_refused(served: Served, prompts: Path) -> None:
    done = bench(served.url, prompts, "--compare", "greedy")
    assert done.code == 2
    assert "with --url there are no-speculation" in " ".join(done.err.split())
