"""The prefix pool behind the server: the same texts, cold and warm, for two servers, and whatever Redis does."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from medusa_cli.serve.policy import Policy, digest_of
from medusa_cli.serve.pools import PoolSettings
from tests.prefix.redis_server import RedisServer
from tests.serve.conftest import Served, guesses, serving, target
from tests.serve.test_api import WORDS, text_of
from tests.serve.test_engine_thread import waits_for
from tests.tiny_models import prompt_of

SYSTEM = prompt_of(70, 3)
PROMPTS = [[*SYSTEM, *prompt_of(3, number)] for number in range(6)]
ASKED: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 6, "ignore_eos": True}


def pooled(words: str = "memory:1GB", secret: bytes | None = None, **settings: Any) -> Any:
    """A server with a pool."""
    model, drafter = target(), guesses()
    chosen = PoolSettings.of(words, secret)
    assert chosen is not None
    return serving(target=model, drafter=drafter, prefixes=chosen.open(model, drafter), **settings)


def ask(served: Served, prompt: list[int], **settings: Any) -> tuple[str, int]:
    """A text, and the tokens of its prompt that were not read."""
    answer = served.post(WORDS, ASKED | {"prompt": prompt}, **settings)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    with serving() as served:
        return [text_of(served, served.plain(prompt, 6)) for prompt in PROMPTS]


def test_a_beginning_that_was_read_is_not_read_again_and_usage_says_so(texts: list[str]) -> None:
    with pooled() as served:
        found = [ask(served, prompt) for prompt in PROMPTS]
        assert [text for text, _ in found] == texts
        assert [cached for _, cached in found] == [0, 64, 64, 64, 64, 64]
        told = served.client().get("/metrics").text
        assert "medusa:prefix_cache_queries_total 384.0" in told
        assert "medusa:prefix_cache_hits_total 320.0" in told


def test_who_has_another_key_reads_anew(texts: list[str]) -> None:
    with pooled(policy=Policy([digest_of("one"), digest_of("two")])) as served:
        for key, cached in (("one", 0), ("one", 64), ("two", 0), ("two", 64)):
            assert ask(served, PROMPTS[0], headers={"authorization": f"Bearer {key}"}) == (texts[0], cached)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as found:
        yield found


def test_what_one_server_read_another_lends(redis: RedisServer, texts: list[str]) -> None:
    with pooled(redis.url) as one:
        assert ask(one, PROMPTS[0]) == (texts[0], 0)
        assert waits_for(lambda: redis.client.dbsize() == 1)
    with pooled(redis.url) as two:
        assert ask(two, PROMPTS[1]) == (texts[1], 64)


def test_who_has_another_secret_shares_nothing(redis: RedisServer, texts: list[str]) -> None:
    with pooled(redis.url, b"one") as one:
        ask(one, PROMPTS[0])
        assert waits_for(lambda: redis.client.dbsize() == 1)
    with pooled(redis.url, b"two") as two:
        assert ask(two, PROMPTS[1]) == (texts[1], 0)


def poison(server: RedisServer) -> None:
    """Every value gets other numbers."""
    for name in server.client.keys("*"):
        value = bytearray(server.client.get(name))
        value[-400:-100] = bytes(300)
        server.client.set(name, bytes(value))


def test_poisoned_values_are_read_by_nobody(redis: RedisServer, texts: list[str]) -> None:
    with pooled(redis.url) as one:
        ask(one, PROMPTS[0])
        assert waits_for(lambda: redis.client.dbsize() == 1)
    poison(redis)
    with pooled(redis.url) as two:
        assert ask(two, PROMPTS[1]) == (texts[1], 0)
        assert "medusa:prefix_pool_errors_total 1.0" in two.client().get("/metrics").text


FAULTS = {
    "killed": lambda server: os.kill(server.pid, signal.SIGKILL),
    "frozen": lambda server: os.kill(server.pid, signal.SIGSTOP),
    "full": lambda server: (
        server.client.config_set("maxmemory-policy", "noeviction"),
        server.client.config_set("maxmemory", 1),
    ),
    "flushed": lambda server: server.client.flushall(),
    "poisoned": poison,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_happens_to_redis_under_load_costs_no_request_and_no_word(
    fault: str, redis: RedisServer, texts: list[str]
) -> None:
    left = [*range(len(PROMPTS))] * 8
    with pooled(f"memory:64KB,{redis.url}", max_waiting=99) as served, ThreadPoolExecutor(6) as clients:
        # so little memory that each chunk comes out of the store, or is read
        asked = [clients.submit(ask, served, PROMPTS[number]) for number in left]
        time.sleep(0.3)
        FAULTS[fault](redis)
        began = time.monotonic()
        found = [each.result(60)[0] for each in asked]
        assert found == [texts[number] for number in left]
        assert time.monotonic() - began < 30
    assert threading.active_count() < 60


def test_a_store_that_drips_delays_one_request(texts: list[str]) -> None:
    from tests.prefix.test_redis_store import liar

    def answer(connection: Any) -> None:
        connection.sendall(b"$90000\r\n")
        while True:
            connection.sendall(b"x")
            time.sleep(0.1)

    with liar(answer) as url, pooled(url) as served:
        began = time.monotonic()
        assert [ask(served, prompt)[0] for prompt in PROMPTS] == texts
        assert time.monotonic() - began < 10
        assert served.worker.prefixes is not None
        assert served.worker.prefixes.pool.counts.faults > 0
