"""Run the server: the port opens at once, the model loads behind it, and texts end before the process does."""

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass

import uvicorn

from medusa_cli.contracts import Drafter
from medusa_cli.errors import DataError, MedusaError
from medusa_cli.model.target import Target
from medusa_cli.serve.app import Policy, State, make_app
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


def serve(serving: Serving, on_ready: Callable[[Service], None]) -> None:
    """Serve until a signal ends it.

    Raises DataError where the port can't be had, and what loading raises, once the port is closed again.
    """
    listening = _listen(serving.host, serving.port)
    state, failed = State(serving.policy), list[BaseException]()

    def load() -> Service:
        target, drafter = serving.load()
        longest = min(length for length in (serving.max_model_len, target.context_limit, LONGEST) if length)
        prefixes = serving.pool.open(target, drafter) if serving.pool else None
        worker = Worker(target, drafter, serving.max_rows, serving.max_waiting, longest, prefixes)
        worker.start()
        return Service(target, worker, serving.name or target.name, serving.max_model_len)

    async def begin() -> None:
        serving.on_open()

        async def loading() -> None:
            try:
                state.service = await asyncio.to_thread(load)
                on_ready(state.service)
            # a bug of ours ends the server as a mistake of the user's does, and is told by who called
            except Exception as error:
                state.fault = error.message if isinstance(error, MedusaError) else "the model could not be loaded"
                failed.append(error)
                server.should_exit = True

        state.loading = asyncio.ensure_future(loading())  # kept, or it might be collected

    async def end() -> None:
        if state.service is not None:
            await asyncio.to_thread(state.service.worker.close, DRAIN_S)

    app = make_app(state, begin, end)
    server = uvicorn.Server(
        uvicorn.Config(
            app, serving.host, serving.port, log_config=None, access_log=False, timeout_graceful_shutdown=int(DRAIN_S)
        )
    )
    server.run([listening])
    if failed:
        raise failed[0]


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
