"""Run the server: the port opens at once, the model loads behind it, and texts end before the process does."""

import asyncio
import gc
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import uvicorn
from fastapi import FastAPI

from medusa_cli.assemble import DrafterChoice, find_heads
from medusa_cli.contracts import Drafter
from medusa_cli.errors import DataError, MedusaError
from medusa_cli.model.target import Target
from medusa_cli.serve.app import make_app
from medusa_cli.serve.policy import Policy, State
from medusa_cli.serve.pools import PoolSettings
from medusa_cli.serve.service import Service
from medusa_cli.serve.worker import Worker

logger = logging.getLogger(__name__)

LONGEST = 8192  # tokens of a text that forwards have room for, where the model has more positions or says nothing
DRAIN_S = 30.0  # that texts are given to end


@dataclass(frozen=True)
class Serving:
    """What is served, and where.

    load          makes the target and its drafter, on a thread of its own
    on_open       told that the port is open and loading begins
    name          that clients call the model by; None: the target's
    max_rows      texts side by side
    max_waiting   texts that wait for a row at most
    pool          keys and values of prompts that were read; None: each is read anew
    """

    load: Callable[[], tuple[Target, Drafter]]
    on_open: Callable[[], None]
    host: str
    port: int
    policy: Policy
    name: str | None = None
    max_model_len: int | None = None
    max_rows: int = 8
    max_waiting: int = 64
    pool: PoolSettings | None = None


@dataclass(frozen=True)
class Life:
    """What happens while a server runs.

    load       makes what answers; what it raises ends the server
    end        lets texts end
    on_open    told that the port is open and loading begins
    on_fault   told in words that loading failed, for those who ask meanwhile
    """

    load: Callable[[], Awaitable[None]]
    end: Callable[[], Awaitable[None]]
    on_open: Callable[[], None]
    on_fault: Callable[[str], None]


Hook = Callable[[], Awaitable[None]]


def serve(serving: Serving, on_ready: Callable[[Service], None]) -> None:
    """Serve until a signal ends it.

    Raises DataError where the port can't be had, and what loading raises, once the port is closed again.
    """
    state = State(serving.policy)

    async def load() -> None:
        state.service = await asyncio.to_thread(load_service, serving)
        on_ready(state.service)

    async def end() -> None:
        if state.service is not None:
            await asyncio.to_thread(state.service.worker.close, DRAIN_S)
        logger.info("ended")

    def on_fault(told: str) -> None:
        state.fault = told

    life = Life(load, end, serving.on_open, on_fault)
    run_app(lambda begin, end: make_app(state, begin, end), serving.host, serving.port, life)


def run_app(make: Callable[[Hook, Hook], FastAPI], host: str, port: int, life: Life) -> None:
    """Run an application until a signal ends it; `make` is told what to do at its start and its end. As `serve`."""
    listening = _listen(host, port)
    failed, kept = list[BaseException](), set[asyncio.Future[None]]()

    async def loading() -> None:
        try:
            await life.load()
        # a bug of ours ends the server as a mistake of the user's does, and is told by who called
        except Exception as error:
            life.on_fault(error.message if isinstance(error, MedusaError) else "the model could not be loaded")
            failed.append(error)
            server.should_exit = True

    async def begin() -> None:
        life.on_open()
        kept.add(asyncio.ensure_future(loading()))  # kept, or it might be collected

    server = uvicorn.Server(
        uvicorn.Config(
            make(begin, life.end),
            host,
            port,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=int(DRAIN_S),
        )
    )
    server.run([listening])
    if failed:
        raise failed[0]


def load_service(serving: Serving) -> Service:
    """The model behind the API, its engine running. Raises what loading raises."""
    target, drafter = serving.load()
    longest = min(length for length in (serving.max_model_len, target.context_limit, LONGEST) if length)
    prefixes = serving.pool.open(target, drafter) if serving.pool else None
    worker = Worker(target, drafter, serving.max_rows, serving.max_waiting, longest, prefixes)
    worker.start()
    settle()
    return Service(target, worker, serving.name or target.name, serving.max_model_len)


def settle() -> None:
    """What is loaded stays: the collector need not look through it each time that a large request was read."""
    gc.collect()
    gc.freeze()


def serving_choice(choice: DrafterChoice, model: str) -> DrafterChoice:
    """Who guesses where nobody is named: those that heads are known for, else who copies from the text itself."""
    if choice.name is None and choice.heads is None and find_heads(None, model) is None:
        return replace(choice, name="suffix")
    return choice


def _listen(host: str, port: int) -> socket.socket:
    """A socket at this address. Raises DataError where it can't be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except OSError as error:
        found.close()
        told = error.strerror or str(error)
        raise DataError(f"can't listen at {host}:{port}: {told}", "choose another --port or --host") from error
    return found
