"""Answers over HTTP: from a good server, and from busy, slow, broken and babbling ones."""

import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from medusa_cli.data import server as module
from medusa_cli.data.conversations import Message
from medusa_cli.data.server import Refused, Reply, Server, find_model, replies
from medusa_cli.errors import DataError
from tests.chat_server import Body, Says, chat_server, completion

KEY = "sk-secret-123"


def to(url: str, **changes: Any) -> Server:
    settings = {"url": url, "model": "big", "temperature": 0.0, "max_tokens": 9, "timeout": 20.0, "tries": 3}
    return Server(**{**settings, "in_flight": 4, "key": "", "first_wait": 0.001, **changes})


def asked(*prompts: str) -> Mapping[str, list[Message]]:
    return {f"row {n}": [Message("user", prompt)] for n, prompt in enumerate(prompts)}


def echo(body: Body) -> Says:
    return completion("You said: " + body["messages"][-1]["content"], usage={"completion_tokens": 5})


def test_each_conversation_is_sent_whole_and_its_answer_comes_back_under_its_key() -> None:
    talk = [Message("system", "Be brief"), Message("user", "a"), Message("assistant", "b"), Message("user", "c")]
    with chat_server(echo) as heard:
        got = dict(replies(to(heard.url, temperature=0.5), {"long": talk, **asked("Hi")}))
    assert got == {"long": Reply("You said: c", "stop", 5), "row 0": Reply("You said: Hi", "stop", 5)}
    (body,) = [body for body in heard.bodies if len(body["messages"]) == 4]
    assert body == {
        "model": "big",
        "messages": [{"role": m.role, "content": m.content} for m in talk],
        "temperature": 0.5,
        "max_tokens": 9,
        "stream": False,
    }
    assert set(heard.paths) == {"/v1/chat/completions"}


def test_as_many_requests_are_in_flight_as_asked_for_and_no_more() -> None:
    together = threading.Barrier(3)

    def answer(body: Body) -> Says:
        together.wait(timeout=20)
        return echo(body)

    with chat_server(answer) as heard:
        assert len(list(replies(to(heard.url, in_flight=3), asked(*"abcdef")))) == 6
    assert heard.most_at_once == 3


@pytest.mark.parametrize(
    "failure",
    [
        Says({"error": {"message": "slow down"}}, 429, {"Retry-After": "0"}),
        Says(b"", 500),
        Says({"error": "loading"}, 503),
        Says(b"<html>proxy</html>"),
        Says({"object": "nothing of use"}),
        Says({"choices": []}),
        Says([1, 2]),
        Says(completion(None).content | {"choices": [{"message": {"content": ["x"]}, "finish_reason": "stop"}]}),
        Says(b'{"choices": [{"message": {"content": "ha', headers={"Content-Length": "5000"}),
    ],
    ids=["429", "500", "503", "html", "no choices", "empty choices", "a list", "no text", "cut body"],
)
def test_a_failure_that_passes_is_tried_again(failure: Says) -> None:
    tries: Counter[str] = Counter()

    def answer(body: Body) -> Says:
        prompt = body["messages"][-1]["content"]
        tries[prompt] += 1
        return failure if prompt == "b" and tries[prompt] < 3 else echo(body)

    with chat_server(answer) as heard:
        got = dict(replies(to(heard.url), asked("a", "b", "c")))
    assert {reply.text for reply in got.values() if isinstance(reply, Reply)} == {
        "You said: a", "You said: b", "You said: c",
    }  # fmt: skip
    assert tries == {"a": 1, "b": 3, "c": 1}


def test_a_failure_that_stays_ends_in_an_error_after_what_has_come() -> None:
    last = threading.Event()

    def answer(body: Body) -> Says:
        if body["messages"][-1]["content"] == "bad":
            last.wait(20)
            return Says({"error": {"message": "no\nmemory"}}, 503)
        return echo(body)

    with chat_server(answer) as heard:
        answers = replies(to(heard.url), asked("bad", "a", "b"))
        assert sorted(next(answers)[0] for _ in range(2)) == ["row 1", "row 2"]
        last.set()
        with pytest.raises(DataError) as caught:
            next(answers)
    assert caught.value.message == f"the server at {heard.url} failed 3 times in a row: HTTP 503: no memory"
    assert "run the same command again" in caught.value.hint
    assert heard.asked.count("bad") == 3


def test_a_server_too_slow_is_tried_again_and_then_given_up() -> None:
    free = threading.Event()

    def answer(body: Body) -> Says:
        free.wait(20)
        return echo(body)

    with chat_server(answer) as heard:
        with pytest.raises(DataError, match="failed 2 times in a row: .*timed out"):
            list(replies(to(heard.url, timeout=0.2, tries=2), asked("a")))
        free.set()
    assert len(heard.bodies) == 2


def test_a_server_that_is_not_there_is_told() -> None:
    with chat_server(echo) as heard:
        url = heard.url
    with pytest.raises(DataError, match="failed 2 times in a row: .*refused"):
        list(replies(to(url, tries=2), asked("a")))


def test_waits_double_and_the_server_s_own_wish_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    class Watched(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            return False

    stop = Watched()
    failures = iter([Says(b"", 500), Says(b"", 500), Says(b"", 429, {"Retry-After": "7"}), Says(b"", 500)])
    with chat_server(lambda body: next(failures, None) or echo(body)) as heard:
        reply = module._ask(to(heard.url, tries=5, first_wait=1.0), [Message("user", "a")], stop)
    assert isinstance(reply, Reply)
    assert [round(wait / base) for wait, base in zip(waits, [1, 2, 7, 8], strict=True)] == [1, 1, 1, 1]
    assert waits[2] == 7


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        (Says({"error": {"message": "too long"}}, 400), "the server refuses it (HTTP 400: too long)"),
        (completion("bad words", "content_filter"), "the server ended its answer with 'content_filter'"),
        (completion(None), "an empty answer"),
        (completion(" \n"), "an empty answer"),
    ],
)
def test_a_prompt_the_server_will_not_answer_is_left_out_and_the_others_go_on(says: Says, reason: str) -> None:
    with chat_server(lambda body: says if body["messages"][0]["content"] == "b" else echo(body)) as heard:
        got = dict(replies(to(heard.url), asked("a", "b", "c")))
    assert got["row 1"] == Refused(reason)
    assert isinstance(got["row 0"], Reply)
    assert len(heard.bodies) == 3


@pytest.mark.parametrize(("status", "hint"), [(401, "OPENAI_API_KEY"), (403, "OPENAI_API_KEY"), (404, "/v1")])
def test_what_no_waiting_mends_stops_at_once_with_advice(status: int, hint: str) -> None:
    with chat_server(lambda body: Says({"error": {"message": f"no, {KEY} is wrong"}}, status)) as heard:
        with pytest.raises(DataError) as caught:
            list(replies(to(heard.url, key=KEY, in_flight=1), asked("a", "b")))
        assert caught.value.message == f"the server at {heard.url} answers HTTP {status}: no, *** is wrong"
        assert hint in caught.value.hint
        assert len(heard.bodies) == 1


def test_the_key_is_sent_and_never_shown_and_no_redirection_gets_it() -> None:
    with (
        chat_server(echo) as other,
        chat_server(lambda body: Says(b"", 307, {"Location": other.url + "/x"})) as heard,
        pytest.raises(DataError, match="HTTP 307"),
    ):
        list(replies(to(heard.url, key=KEY), asked("a")))
    assert heard.keys == {f"Bearer {KEY}"}
    assert not other.paths
    assert KEY not in repr(to(heard.url, key=KEY))


def test_the_only_model_served_is_found_and_several_are_named() -> None:
    with chat_server(echo, models=("org/big",)) as heard:
        assert find_model(to(heard.url, model="")) == "org/big"
    assert heard.paths == ["/v1/models"]
    with chat_server(echo, models=("one", "two")) as heard, pytest.raises(DataError, match=r"2 models \(one, two\)"):
        find_model(to(heard.url))
    with chat_server(echo, models=()) as heard, pytest.raises(DataError, match="doesn't tell which models") as caught:
        find_model(to(heard.url))
    assert "data.server_model=NAME" in caught.value.hint


def test_whoever_stops_listening_does_not_wait_for_answers_on_their_way() -> None:
    free = threading.Event()

    def answer(body: Body) -> Says:
        if body["messages"][-1]["content"] != "a":
            free.wait(20)
        return echo(body)

    with chat_server(answer) as heard:
        listening = replies(to(heard.url), asked("a", "b", "c"))
        assert next(listening)[0] == "row 0"
        before = time.monotonic()
        listening.close()
        assert not free.is_set()
        assert time.monotonic() - before < 15, "closing waited for the server"
        free.set()
