"""Many clients at once: every text is the one written alone, whoever comes, goes, reads slowly or breaks something."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from medusa_cli.decode.engine import Engine
from medusa_cli.serve.policy import Policy
from tests.serve.conftest import Served, serving
from tests.serve.test_api import CHAT, GO, HI, WORDS, text_of


def prompt_of(number: int) -> list[int]:
    return [5 + number % 7, 9, 11 + number % 5, 4 + number % 3]


def test_two_hundred_clients_each_get_their_own_text() -> None:
    with serving(max_rows=6, max_waiting=400) as served:
        wanted = {tuple(prompt_of(number)): None for number in range(200)}
        alone = {prompt: text_of(served, served.plain(list(prompt), 12)) for prompt in wanted}

        def ask(number: int) -> bool:
            prompt = prompt_of(number)
            stream = number % 3 == 0
            answer = served.post(WORDS, GO | {"prompt": prompt, "max_tokens": 12, "stream": stream})
            assert answer.status_code == 200
            if stream:
                lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line][:-1]
                text = "".join(json.loads(line)["choices"][0]["text"] for line in lines)
            else:
                text = answer.json()["choices"][0]["text"]
            return text == alone[tuple(prompt)]

        with ThreadPoolExecutor(40) as clients:
            assert all(clients.map(ask, range(200)))
        stats = served.worker.stats()
        assert (stats.rows, stats.reading, stats.waiting, served.worker.num_waiting) == (0, 0, 0, 0)


def test_rows_that_are_sampled_beside_others_write_what_they_write_alone() -> None:
    with serving() as served:
        asked = [
            GO | {"temperature": 1.2, "seed": seed, "prompt": prompt_of(seed), "max_tokens": 10} for seed in range(8)
        ]
        alone = [served.post(WORDS, each).json()["choices"] for each in asked]
        with ThreadPoolExecutor(8) as clients:
            beside = list(clients.map(lambda each: served.post(WORDS, each).json()["choices"], asked))
        assert beside == alone


def slow(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda self: (time.sleep(seconds), step(self))[1])


def waits_for(condition: Any, patience_s: float = 10.0) -> bool:
    ends = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > ends:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_has_gone_frees_its_row(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, 0.05)
    with serving() as served:
        document = GO | {"max_tokens": 60, "ignore_eos": True, "stream": stream, "speculate": False}
        with served.client() as client:
            if stream:
                with client.stream("POST", WORDS, json=document) as answer:
                    next(answer.iter_lines())
                    assert served.worker.stats().rows == 1
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.post(WORDS, json=document, timeout=0.5)
        assert waits_for(lambda: served.worker.stats().rows == 0, 2.0)
        assert served.post(WORDS, GO).status_code == 200


def test_a_reader_that_is_slow_holds_nobody_up() -> None:
    with serving(max_rows=2) as served, served.client() as client:
        document = GO | {"max_tokens": 50, "ignore_eos": True, "stream": True}
        with client.stream("POST", WORDS, json=document) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            for _ in range(3):
                assert served.post(WORDS, GO).status_code == 200
            rest = [first, *lines]
        assert rest[-2:] == ["data: [DONE]", ""] or "[DONE]" in "".join(rest[-2:])


def test_a_full_queue_says_when_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, 0.05)
    with serving(Policy(retry_s=3), max_rows=1, max_waiting=2) as served, ThreadPoolExecutor(6) as clients:
        asked = [clients.submit(served.post, WORDS, GO | {"ignore_eos": True, "max_tokens": 20}) for _ in range(6)]
        answers = [each.result() for each in asked]
        codes = sorted(answer.status_code for answer in answers)
        assert codes[:3] == [200, 200, 200]
        assert codes[-1] == 429
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.headers["retry-after"] == "3"
        assert refused.json()["error"]["type"] == "rate_limit_error"


def test_turns_go_round_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, 0.01)
    with serving(Policy(), max_rows=1, max_waiting=50) as served:
        done: list[str] = []

        def ask(who: str) -> None:
            answer = served.post(WORDS, GO | {"ignore_eos": True}, headers={"Authorization": f"Bearer {who}"})
            assert answer.status_code == 200
            done.append(who)

        with ThreadPoolExecutor(12) as clients:
            many = [clients.submit(ask, "many") for _ in range(10)]
            assert waits_for(lambda: served.worker.num_waiting >= 8)
            one = clients.submit(ask, "one")
            for each in (*many, one):
                each.result()
        assert done.index("one") < 6, "it waits for one text or two, not for ten"


def test_an_answer_that_takes_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, 0.1)
    with serving(Policy(timeout_s=0.3)) as served:
        answer = served.post(WORDS, GO | {"max_tokens": 50, "ignore_eos": True, "speculate": False})
        assert answer.status_code == 408
        assert answer.json()["error"]["code"] == "timeout"
        streamed = served.post(WORDS, GO | {"max_tokens": 50, "ignore_eos": True, "stream": True, "speculate": False})
        assert '"code":"timeout"' in streamed.text
        assert "[DONE]" not in streamed.text
        assert waits_for(lambda: served.worker.stats().rows == 0)


def test_a_step_that_breaks_off_loses_its_texts_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    step, broken = Engine.step, threading.Event()

    def breaks(self: Engine) -> Any:
        if broken.is_set() and self.active:
            broken.clear()
            raise RuntimeError("a cable was pulled")
        return step(self)

    monkeypatch.setattr(Engine, "step", breaks)
    with serving() as served:
        wanted = served.post(CHAT, HI).json()["choices"]
        broken.set()
        answer = served.post(CHAT, HI)
        assert answer.status_code == 500
        assert "the text is lost" in answer.json()["error"]["message"]
        assert "cable" not in answer.text
        assert served.post(CHAT, HI).json()["choices"] == wanted
        with served.client() as client:
            assert client.get("/health").status_code == 200


def test_what_is_written_is_finished_when_the_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, 0.03)
    with serving() as served, ThreadPoolExecutor(2) as clients:
        long = clients.submit(served.post, WORDS, GO | {"max_tokens": 20, "ignore_eos": True, "speculate": False})
        assert waits_for(lambda: served.worker.stats().rows == 1)
        closing = clients.submit(served.worker.close, 20.0)
        time.sleep(0.1)
        refused = served.post(WORDS, GO)
        assert refused.status_code == 503
        with served.client() as client:
            assert client.get("/health").status_code == 503
        assert long.result().status_code == 200
        closing.result()


# --- other clients ---


def test_the_openai_client(served: Served) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": "w5 w6 w7"}]
    whole = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=8, logprobs=True)
    text = whole.choices[0].message.content
    pieces = client.chat.completions.create(
        model="tiny",
        messages=messages,
        temperature=0,
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(pieces)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage == whole.usage
    assert client.completions.create(model="tiny", prompt="w5 w6 w7", temperature=0, max_tokens=8).choices[0].text
    assert [model.id for model in client.models.list()] == ["tiny"]
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="other", messages=messages)
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        client.chat.completions.create(model="tiny", messages=messages, tools=[tool])
