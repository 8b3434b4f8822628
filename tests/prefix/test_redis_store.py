"""Chunks in Redis: a real server that is shared, killed, frozen, full, emptied, and one that answers rubbish."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from medusa_cli.errors import DataError
from medusa_cli.prefix.memory import Memory
from medusa_cli.prefix.pool import PrefixPool, StoreFault
from medusa_cli.prefix.redis_store import NAME, RedisStore, Rests
from tests.prefix.redis_server import RedisServer
from tests.prefix.test_values import KEY, chunk, values

HOUR = 3600.0
OTHER = b"o" * 32


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as found:
        yield found


@pytest.fixture
def empty(server: RedisServer) -> RedisServer:
    server.client.flushall()
    server.client.config_set("maxmemory", 0)
    return server


def store_at(url: str, secret: bytes | None = None, lifetime_s: float = HOUR) -> RedisStore:
    return RedisStore(url, values(secret), lifetime_s)


def same(one: Any, other: Any) -> bool:
    return all(
        bool((part == other.layers[number][place]).all())
        for number, parts in one.layers.items()
        for place, part in enumerate(parts)
    )


def test_what_one_process_stored_another_reads(empty: RedisServer) -> None:
    store_at(empty.url).store(KEY, chunk())
    found = store_at(empty.url).fetch(KEY)
    assert found is not None
    assert same(chunk(), found)
    assert store_at(empty.url).fetch(OTHER) is None


def test_a_chunk_is_written_once_and_lives_as_long_as_asked(empty: RedisServer) -> None:
    store_at(empty.url, lifetime_s=100).store(KEY, chunk())
    name = NAME + KEY.hex().encode()
    assert 90_000 < empty.client.pttl(name) <= 100_000
    store_at(empty.url, lifetime_s=5000).store(KEY, chunk())
    assert empty.client.pttl(name) <= 100_000


@pytest.mark.parametrize("wrong", [b"", b"rubbish", b"\x80\x04K\x01."])
def test_a_value_that_is_no_chunk_is_a_fault_and_makes_room_for_a_right_one(empty: RedisServer, wrong: bytes) -> None:
    empty.client.set(NAME + KEY.hex().encode(), wrong)
    store = store_at(empty.url)
    with pytest.raises(StoreFault, match="not one of this model"):
        store.fetch(KEY)
    store.store(KEY, chunk())
    assert same(chunk(), store.fetch(KEY))


def test_a_list_under_the_key_is_a_fault(empty: RedisServer) -> None:
    empty.client.lpush(NAME + KEY.hex().encode(), "x")
    with pytest.raises(StoreFault, match="WRONGTYPE"):
        store_at(empty.url).fetch(KEY)


def test_a_full_server_is_a_fault_of_storing(empty: RedisServer) -> None:
    empty.client.config_set("maxmemory", 1)
    empty.client.config_set("maxmemory-policy", "noeviction")
    with pytest.raises(StoreFault, match="maxmemory"):
        store_at(empty.url).store(KEY, chunk())


def test_a_server_that_is_gone_is_asked_once_and_then_left_alone(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as found:
        url = found.url
    store = store_at(url)
    with pytest.raises(StoreFault, match="ConnectionError"):
        store.fetch(KEY)
    began = time.monotonic()
    assert all(store.fetch(KEY) is None for _ in range(100))
    assert time.monotonic() - began < 0.2


def test_a_frozen_server_costs_one_wait(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as found:
        store = store_at(found.url)
        store.store(KEY, chunk())
        os.kill(found.pid, signal.SIGSTOP)
        try:
            with pytest.raises(StoreFault, match="Timeout"):
                store.fetch(KEY)
            assert store.fetch(KEY) is None
        finally:
            os.kill(found.pid, signal.SIGCONT)


@contextmanager
def liar(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that speaks as it likes."""
    listening = socket.create_server(("127.0.0.1", 0))
    held: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            held.append(connection)
            threading.Thread(target=talk, args=(connection,), daemon=True).start()

    def talk(connection: socket.socket) -> None:
        try:
            while connection.recv(65536):
                answer(connection)
        except OSError:
            pass

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"redis://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        listening.close()
        for each in held:
            each.close()


RUBBISH = {
    "noise": b"\xff\xfe\r\n" * 9,
    "web": b"HTTP/1.1 200 OK\r\n\r\n",
    "huge": b"$99999999999\r\nab",
    "negative": b"$-7\r\n",
    "nested": b"*1\r\n" * 5000,
    "number": b":12\r\n",
    "error": b"-ERR no\r\n",
    "closed": b"",
}


@pytest.mark.parametrize("kind", RUBBISH)
def test_rubbish_is_a_fault_or_a_miss(kind: str) -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(RUBBISH[kind])
        if not RUBBISH[kind]:
            connection.close()

    with liar(answer) as url:
        told: list[str] = []
        pool = PrefixPool(Memory(2**20), store_at(url), told.append)
        future = pool.prefetch([KEY])
        assert future is not None
        future.result(5)
        assert len(pool.memory) == 0
        assert pool.counts.faults == len(told) > 0


def test_a_server_that_sends_a_byte_now_and_then_is_interrupted() -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(b"$4000\r\n")
        while True:
            connection.sendall(b"x")
            time.sleep(0.1)

    with liar(answer) as url:
        pool = PrefixPool(Memory(2**20), store_at(url))
        future = pool.prefetch([KEY])
        assert future is not None
        time.sleep(0.3)
        assert not future.done()
        pool.interrupt()
        future.result(5)
        assert pool.prefetch([KEY]) is None or pool.counts.faults >= 1


@pytest.mark.parametrize("url", ["redis://[", "redis://host:port", "redis://127.0.0.1:1/0?bad_option=maybe"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(DataError, match="--prefix-pool"):
        store_at(url)


def test_rests_grow_and_end() -> None:
    now = [100.0]
    rests = Rests(lambda: now[0])
    waits = []
    for _ in range(8):
        rests.failed()
        began = now[0]
        while rests.resting:
            now[0] += 0.5
        waits.append(now[0] - began)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    rests.worked()
    rests.failed()
    assert rests.resting
    now[0] += 1
    assert not rests.resting


def test_a_pool_shares_through_the_store_in_the_background(empty: RedisServer) -> None:
    one, two = (PrefixPool(Memory(2**20), store_at(empty.url)) for _ in range(2))
    one.put(KEY, chunk())
    ends = time.monotonic() + 10
    while not empty.client.exists(NAME + KEY.hex().encode()) and time.monotonic() < ends:
        time.sleep(0.01)
    future = two.prefetch([KEY, OTHER])
    assert future is not None
    future.result(5)
    (found,) = two.find([KEY, OTHER])
    assert same(chunk(), found)
    assert two.counts.fetched == 1
    assert two.prefetch([KEY]) is None, "it is here"
    for pool in (one, two):
        pool.close()
