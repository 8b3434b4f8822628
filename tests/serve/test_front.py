"""HTTP in front of several replicas: answers are theirs, and what is lost with one is asked of another. No Ray here."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from medusa_cli.serve.front import Full, Lost, Unready, make_front, routing_key
from medusa_cli.serve.policy import Policy, digest_of
from medusa_cli.serve.replica import Ask, Opening, Piece, Replica
from medusa_cli.serve.service import Service
from medusa_cli.serve.worker import Worker
from tests.serve.conftest import guesses, listening, serving, target
from tests.serve.test_api import CHAT, GO, HI, WORDS, events
from tests.serve.test_engine_thread import slow, waits_for


@dataclass
class Here:
    """Replicas in this process; requests go round them.

    lost_after   pieces of an answer that the next requests get before their replica is lost
    refuses      what is raised instead of an answer
    lost_at_end  whether replicas are lost once they have written all of it
    """

    replicas: list[Replica]
    lost_after: list[int] = field(default_factory=list)
    refuses: type[Exception] | None = None
    asked: list[Ask] = field(default_factory=list)
    lost_at_end: bool = False

    async def ask(self, ask: Ask, key: str) -> AsyncGenerator[Piece, None]:
        if self.refuses is not None:
            raise self.refuses
        self.asked.append(ask)
        left = self.lost_after.pop(0) if self.lost_after else None
        async with aclosing(self.replicas[len(self.asked) % len(self.replicas)].answer(ask)) as answer:
            async for piece in answer:
                if left == 0:
                    raise Lost
                yield piece
                left = None if left is None else left - 1
        if self.lost_at_end:
            raise Lost

    async def running(self) -> int:
        return len(self.replicas)

    async def metrics(self) -> Mapping[str, str]:
        return {f"r{number}": replica.metrics() for number, replica in enumerate(self.replicas)}


@dataclass
class Fronted:
    """A front over two replicas of one target."""

    url: str
    here: Here
    workers: list[Worker]

    def post(self, path: str, document: Any, **settings: Any) -> httpx.Response:
        return httpx.post(self.url + path, content=json.dumps(document), timeout=60, **settings)

    def counted(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"medusa:{name}"))


POLICY = Policy(keys=(), body_bytes=4096)


async def nothing() -> None: ...


@pytest.fixture
def fronted(request: pytest.FixtureRequest) -> Iterator[Fronted]:
    policy, found = getattr(request, "param", POLICY), target()
    workers = [Worker(found, guesses(), 4, 16, 64) for _ in range(2)]
    for worker in workers:
        worker.start()
    here = Here([Replica(Service(found, worker, "tiny"), policy) for worker in workers])
    with listening(make_front(policy, here, nothing, nothing)) as url:
        yield Fronted(url, here, workers)
    for worker in workers:
        worker.close(5.0)


def alike(document: Any) -> Any:
    """An answer without what names the request."""
    return {name: value for name, value in document.items() if name not in ("id", "created")}


def test_answers_are_those_of_one_server(fronted: Fronted) -> None:
    with serving() as alone:
        for path, document in ((CHAT, HI), (WORDS, GO), (WORDS, GO | {"n": 2}), (CHAT, HI | {"model": "other"})):
            answer, wanted = fronted.post(path, document), alone.post(path, document)
            assert answer.status_code == wanted.status_code
            assert alike(answer.json()) == alike(wanted.json())
        streams = [events(each.post(CHAT, HI | {"stream": True}).text) for each in (fronted, alone)]
        assert [alike(each) for each in streams[0]] == [alike(each) for each in streams[1]]
        models = [httpx.get(f"{url}/v1/models").json()["data"][0]["id"] for url in (fronted.url, alone.url)]
        assert models == ["tiny", "tiny"]
    assert httpx.get(f"{fronted.url}/health").json() == {"status": "ok", "replicas": 2}


def test_what_is_wrong_is_told_as_one_server_tells_it(fronted: Fronted) -> None:
    assert httpx.get(f"{fronted.url}/nowhere").json()["error"]["message"] == "there is nothing here"
    assert httpx.get(f"{fronted.url}{CHAT}").status_code == 405
    assert fronted.post(WORDS, GO | {"prompt": "w5 " * 3000}).json()["error"]["code"] == "body_too_large"
    assert httpx.post(f"{fronted.url}{WORDS}", content=b"{").json()["error"]["message"] == "the body is no JSON"
    fronted.here.refuses = Full
    answer = fronted.post(WORDS, GO)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    fronted.here.refuses = Unready
    assert fronted.post(WORDS, GO).status_code == 503


@pytest.mark.parametrize("fronted", [Policy(keys=[digest_of("mine")])], indirect=True)
def test_a_key_is_asked_for_before_a_replica_is(fronted: Fronted) -> None:
    assert fronted.post(CHAT, HI).status_code == 401
    assert not fronted.here.asked
    assert fronted.post(CHAT, HI, headers={"Authorization": "Bearer mine"}).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_replica_that_is_lost_before_a_word_was_sent_costs_nothing(fronted: Fronted, stream: bool) -> None:
    whole = fronted.post(WORDS, GO).json()["choices"][0]["text"]
    asked = len(fronted.here.asked)
    fronted.here.lost_after = [0, 0]
    answer = fronted.post(WORDS, GO | {"stream": stream})
    assert answer.status_code == 200
    if stream:
        text = "".join(choice["text"] for chunk in events(answer.text) for choice in chunk["choices"])
    else:
        text = answer.json()["choices"][0]["text"]
    assert text == whole
    assert len(fronted.here.asked) == asked + 3
    assert fronted.counted("requests_asked_again_total") == 2


def test_a_stream_whose_replica_is_lost_says_so_and_ends(fronted: Fronted) -> None:
    whole = fronted.post(WORDS, GO).json()["choices"][0]["text"]
    fronted.here.lost_after = [2]
    answer = fronted.post(WORDS, GO | {"stream": True, "speculate": False})
    lines = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line]
    assert lines[-1]["error"]["code"] == "replica_lost"
    text = "".join(choice["text"] for chunk in lines[:-1] for choice in chunk["choices"])
    assert text
    assert whole.startswith(text)
    assert fronted.counted("streams_broken_off_total") == 1


def test_a_stream_that_is_whole_is_whole_whatever_becomes_of_its_replica(fronted: Fronted) -> None:
    wanted = events(fronted.post(WORDS, GO | {"stream": True}).text)
    fronted.here.lost_at_end = True
    found = events(fronted.post(WORDS, GO | {"stream": True}).text)
    assert [each["choices"] for each in found] == [each["choices"] for each in wanted]
    assert fronted.counted("streams_broken_off_total") == 0


def test_a_request_that_ends_replica_after_replica_is_given_up(fronted: Fronted) -> None:
    fronted.here.lost_after = [0] * 9
    answer = fronted.post(WORDS, GO)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_lost")
    assert len(fronted.here.asked) == 3


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_has_gone_frees_its_row(fronted: Fronted, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, 0.05)
    document = GO | {"max_tokens": 60, "ignore_eos": True, "stream": stream, "speculate": False}

    def rows() -> int:
        return sum(worker.stats().rows for worker in fronted.workers)

    with httpx.Client(base_url=fronted.url, timeout=0.5) as client:
        if stream:
            with client.stream("POST", WORDS, json=document) as answer:
                next(answer.iter_lines())
                assert rows() == 1
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(WORDS, json=document)
    assert waits_for(lambda: rows() == 0, 2.0)


@pytest.mark.parametrize("fronted", [Policy(timeout_s=0.3)], indirect=True)
def test_an_answer_that_takes_too_long_is_told_so(fronted: Fronted, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, 0.1)
    begun = time.monotonic()
    answer = fronted.post(WORDS, GO | {"max_tokens": 60, "ignore_eos": True, "speculate": False})
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "timeout")
    assert time.monotonic() - begun < 5
    assert waits_for(lambda: not any(worker.stats().rows for worker in fronted.workers), 2.0)


def test_an_answer_that_was_left_before_it_arrived_is_not_begun(fronted: Fronted) -> None:
    (replica, _), ask = fronted.here.replicas, Ask("early", "GET", "/v1/models", b"", [], None, b"")

    async def pieces() -> list[Piece]:
        return [piece async for piece in replica.answer(ask)]

    (opening,) = asyncio.run(pieces())
    assert isinstance(opening, Opening)
    assert opening.status == 200
    asyncio.run(replica.leave("early"))
    assert not asyncio.run(pieces())


def test_an_answer_that_is_left_by_word_frees_its_row(fronted: Fronted, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, 0.05)
    document = GO | {"max_tokens": 60, "ignore_eos": True, "stream": True, "speculate": False}
    ask = Ask("long", "POST", WORDS, b"", [], None, json.dumps(document).encode())

    async def left_after_a_word() -> int:
        got = 0
        async for _ in fronted.here.replicas[0].answer(ask):
            got += 1
            await fronted.here.replicas[0].leave("long")
        return got

    assert asyncio.run(left_after_a_word()) < 10
    assert waits_for(lambda: fronted.workers[0].stats().rows == 0, 2.0)


def test_every_figure_says_whose_it_is(fronted: Fronted) -> None:
    for _ in range(4):
        fronted.post(WORDS, GO)
    text = httpx.get(f"{fronted.url}/metrics").text
    assert 'medusa:generation_tokens_total{replica="r0"} 16.0' in text
    assert 'medusa:generation_tokens_total{replica="r1"} 16.0' in text
    types = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))


def key_of(document: Any, authorization: bytes = b"") -> str:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return routing_key(Ask("id", "POST", CHAT, b"", [(b"authorization", authorization)], None, body))


def test_turns_of_a_conversation_go_to_one_replica() -> None:
    system, first = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
    said, second = {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "And now?"}
    begun = key_of({"messages": [system, first]})
    assert begun == key_of({"messages": [system, first, said, second], "temperature": 1.5})
    assert begun != key_of({"messages": [system, second]})
    assert begun != key_of({"messages": [system, first]}, b"Bearer another")


def test_prompts_with_one_long_beginning_go_to_one_replica() -> None:
    book = "word " * 200
    assert key_of({"prompt": book + "one"}) == key_of({"prompt": [book + "two"]})
    assert key_of({"prompt": list(range(300))}) == key_of({"prompt": list(range(200))})
    assert key_of({"prompt": "one"}) != key_of({"prompt": "two"})


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"{}", {"messages": 3}, {"prompt": None}, {"messages": [], "prompt": []}]
)
def test_what_is_no_request_goes_anywhere(body: Any) -> None:
    assert key_of(body)
