"""A real server over a tiny random model, on a port of its own; and one text of it written alone."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from medusa_cli.acceptance.sampling import GREEDY
from medusa_cli.contracts import Drafter
from medusa_cli.decode.chat import ends_of
from medusa_cli.decode.engine import Engine, Request
from medusa_cli.drafters.mixed import Budget, GatheredDrafter
from medusa_cli.drafters.none import NoDrafter
from medusa_cli.drafters.suffix import Suffixes
from medusa_cli.model.target import Target
from medusa_cli.serve.app import make_app
from medusa_cli.serve.policy import Policy, State
from medusa_cli.serve.service import Service
from medusa_cli.serve.worker import Worker
from tests.tiny_folders import CHAT_TEMPLATE, tiny_tokenizer
from tests.tiny_models import target_of, tiny_model


@dataclass
class Served:
    """A server that runs."""

    url: str
    state: State
    target: Target
    worker: Worker

    def client(self, **settings: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **settings)

    def post(self, path: str, document: Any, **settings: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, content=json.dumps(document), **settings)

    def plain(self, prompt: Sequence[int], max_tokens: int, stops: Sequence[str] = ()) -> list[int]:
        """The greedy text after these ids, written alone and without guesses."""
        engine = Engine(self.target, NoDrafter())
        engine.add(Request(list(prompt), ends_of(self.target, max_tokens, stops).limits, GREEDY))
        written: list[int] = []
        while not engine.idle:
            for gain in engine.step():
                written += gain.tokens
        return written


def target() -> Target:
    return target_of(tiny_model("llama"), tokenizer=tiny_tokenizer(CHAT_TEMPLATE))


def guesses() -> Drafter:
    return GatheredDrafter([Suffixes()], Budget(6), "suffix")


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """The URL of an application that runs on a free port, until the block ends."""
    found = socket.socket()
    found.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([found])))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{found.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def serving(policy: Policy | None = None, max_rows: int = 4, max_waiting: int = 16, **parts: Any) -> Iterator[Served]:
    """A server on a free port, until the block ends."""
    found = parts.get("target") or target()
    worker = Worker(found, parts.get("drafter") or guesses(), max_rows, max_waiting, 64, parts.get("prefixes"))
    worker.start()
    service = Service(found, worker, "tiny", parts.get("max_model_len"))
    state = State(policy or Policy(), service)

    async def nothing() -> None: ...

    try:
        with listening(make_app(state, nothing, nothing)) as url:
            yield Served(url, state, found, worker)
    finally:
        worker.close(5.0)


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    with serving() as found:
        yield found


Serving = Callable[..., Any]
