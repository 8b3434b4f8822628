"""`medusa chat --url`: replies of our server and of others, and what is said when they fail."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from medusa_cli.serve.policy import Policy, digest_of
from tests.chat_server import Says, chat_server
from tests.cli.harness import Done, Medusa, in_two_lines
from tests.serve.conftest import Served, serving

ROOT = Path(__file__).parents[2]
KEY = "sk-very-secret"


@pytest.fixture(scope="module")
def ours() -> Iterator[Served]:
    with serving() as found:
        yield found


@pytest.fixture
def chat(medusa: Medusa, monkeypatch: pytest.MonkeyPatch) -> Medusa:
    monkeypatch.delenv("MEDUSA_API_KEY", raising=False)

    def run(url: str, *args: object, stdin: str = "w5 w6\n") -> Done:
        return medusa("chat", "--url", url, *args, stdin=stdin)

    return run


def events(*documents: Any, done: bool = True) -> Says:
    """A stream of server-sent events."""
    lines = [f"data: {json.dumps(each)}\n\n" for each in documents] + ["data: [DONE]\n\n"] * done
    return Says("".join(lines).encode(), headers={"Content-Type": "text/event-stream"})


def piece(text: str | None, finish_reason: str | None = None) -> dict[str, Any]:
    """One chunk of a stream."""
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}]}


@pytest.mark.parametrize("flags", [(), ("--temperature", "0", "--stop", "zz", "--repetition-penalty", "1")])
def test_replies_are_those_of_our_server(chat: Medusa, ours: Served, flags: Sequence[str]) -> None:
    done = chat(ours.url, "--json", "-n", 6, *flags, stdin="w5 w6\nw7\n")
    assert done.code == 0, done.err
    messages, tokenizer = done.document["messages"], ours.target.tokenizer
    assert [one["role"] for one in messages] == ["user", "assistant"] * 2
    for place, reply in ((1, 0), (3, 1)):
        ids = tokenizer.apply_chat_template(messages[:place], add_generation_prompt=True)["input_ids"]
        wanted = ours.plain(ids, 6)
        figures = done.document["replies"][reply]
        assert messages[place]["content"] == tokenizer.decode(wanted, skip_special_tokens=True)
        assert figures["completion_tokens"] == len(wanted)
        assert figures["prompt_tokens"] == len(ids)
        assert figures["num_steps"] <= len(wanted) - 1
        assert figures["tokens_per_step"] == pytest.approx((len(wanted) - 1) / figures["num_steps"])
    assert done.document["url"] == f"{ours.url}/v1"
    assert done.document["model"] == "tiny"


def test_the_server_is_asked_for_what_the_flags_say_and_for_nothing_else(chat: Medusa) -> None:
    with chat_server(lambda _: events(piece("It is "), piece("so."), piece(None, "stop"))) as heard:
        plain = chat(heard.url, "-n", 7)
        many = ("--temperature", 0.5, "--top-p", 0.9, "--top-k", 5, "--seed", 3, "--stop", "a", "--stop", "b")
        chat(heard.url, "-m", "another", "--system-prompt", "Be.", "--ignore-eos", *many, stdin="a\nb\n")
    assert plain.out == "It is so.\n"
    assert "first after" in plain.err
    assert "tokens" not in plain.err, "the server told no counts"
    asked = {
        "model": "big", "messages": [{"role": "user", "content": "w5 w6"}], "max_tokens": 7, "temperature": 0.0,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert heard.bodies[0] == asked
    last = heard.bodies[-1]
    assert last["messages"] == [
        {"role": "system", "content": "Be."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "It is so."},
        {"role": "user", "content": "b"},
    ]
    assert {name: last[name] for name in last if name not in asked} == {
        "top_p": 0.9, "top_k": 5, "seed": 4, "stop": ["a", "b"], "ignore_eos": True,
    }  # fmt: skip
    assert last["model"] == "another"


def test_a_key_goes_into_the_header_and_into_no_message(chat: Medusa, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Policy(keys=[digest_of(KEY)])) as locked:
        refused = chat(locked.url)
        monkeypatch.setenv("MEDUSA_API_KEY", KEY)
        let_in = chat(locked.url, "--json", "-v")
    assert refused.code == 1
    assert "HTTP 401" in refused.err
    assert "MEDUSA_API_KEY=" in refused.err
    assert let_in.code == 0, let_in.err
    assert KEY not in let_in.out + let_in.err
    with chat_server(lambda _: Says({"error": {"message": f"{KEY} is no key"}}, 403)) as heard:
        told = chat(heard.url, "-m", "big")
    assert heard.keys == {f"Bearer {KEY}"}
    assert "*** is no key" in told.err
    assert KEY not in told.err


@pytest.mark.parametrize(
    ("says", "told"),
    [
        (Says({"error": {"message": "too\nbusy"}}, 429), "HTTP 429: too busy"),
        (Says(b"<html>Bad gateway", 502), "HTTP 502: "),
        (Says({"error": {"message": "there is no small"}}, 404), "is the model there?"),
        (Says(b"", 307, {"Location": "http://127.0.0.1:9/"}), "HTTP 307"),
        (
            Says({"error": {"message": "it holds 64", "code": "context_length_exceeded"}}, 400),
            "the context is full: /save FILE keeps",
        ),
        (Says(b"hello", headers={"Content-Type": "text/plain"}), "stopped in the middle"),
        (events(piece("It"), done=False), "stopped in the middle"),
        (events(piece("It"), {"error": {"message": "a step broke off"}}), "a step broke off"),
        (Says(b"data: {}\n\n", headers={"Content-Length": "999"}), "went away"),
        (events([], "x", {"choices": 3}, {"choices": []}, {"choices": [{"delta": 3}]}), "stopped in the middle"),
    ],
)
def test_a_failure_is_told_in_words_and_loses_nothing(chat: Medusa, tmp_path: Path, says: Says, told: str) -> None:
    answers = iter([events(piece("First."), piece(None, "stop")), says])
    out = tmp_path / "out.json"
    with chat_server(lambda _: next(answers)) as heard:
        done = chat(heard.url, "--output-json", out, stdin="one\ntwo\nthree\n")
    assert done.code == 1
    assert told in done.err
    assert in_two_lines(done.err.replace("broken off; the part", ""))
    document = json.loads(out.read_text())
    said = [one["content"] for one in document["messages"]]
    assert said[:2] == ["one", "First."]
    assert said[2:] in ([], ["two", "It"]), "a part that was shown stays"
    assert document["replies"][1]["finish_reason"] == "error"


def test_a_context_that_our_server_finds_full_is_told_so(chat: Medusa, ours: Served) -> None:
    most = ours.target.context_limit
    assert most
    cut = chat(ours.url, stdin="w5 " * (most - 20) + "\n")
    assert "; cut off, the server allows no more: /reset begins another conversation" in cut.err
    done = chat(ours.url, stdin="w5 " * most + "\n")
    assert done.code == 1
    assert f"maximum context length is {most}" in done.err
    assert "the context is full: /save FILE keeps the conversation, /reset begins another" in done.err


def test_a_server_that_is_not_there_or_has_several_models_is_told_at_once(chat: Medusa) -> None:
    with chat_server(lambda _: events(), models=("a", "b")) as heard:
        several = chat(heard.url)
        url = heard.url
    gone = chat(url)
    for done, told in ((several, "serves 2 models (a, b)"), (gone, "no server answers at")):
        assert (done.code, done.out) == (1, "")
        assert told in done.err
        assert in_two_lines(done.err)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://127.0.0.1/v1", "http://", "http://[1/v1", ""])
def test_what_is_no_url_is_a_usage_error(chat: Medusa, url: str) -> None:
    done = chat(url)
    assert (done.code, done.out) == (2, "")
    assert "is no URL of a server" in " ".join(done.err.split())


def test_what_the_api_has_no_field_for_is_refused(chat: Medusa) -> None:
    with chat_server(lambda _: events()) as heard:
        done = chat(heard.url, "--temperature", 1, "--acceptance", "typical")
        later = chat(heard.url, stdin="/set min-new-tokens 3\n")
    assert done.code == 2
    assert "--acceptance can't be asked of a server" in done.err
    assert later.code == 1
    assert "--min-new-tokens can't be asked of a server" in later.err
    assert not heard.bodies


def test_it_needs_no_torch() -> None:
    program = (
        "import sys; from medusa_cli.cli.app import main; code = main(sys.argv[1:]); "
        "sys.exit(9 if {'torch', 'transformers'} & set(sys.modules) else code)"
    )
    with chat_server(lambda _: events(piece("Hello."), piece(None, "stop"))) as heard:
        command = [sys.executable, "-c", program, "chat", "--url", heard.url]
        run = subprocess.run(command, input="Hi\n", capture_output=True, text=True, cwd=ROOT)
    assert (run.returncode, run.stdout) == (0, "Hello.\n"), run.stderr
