"""One of several engines that answer alike: the whole HTTP application, asked by messages instead of a socket.

Knows nothing of how messages travel.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from medusa_cli.serve.app import make_app
from medusa_cli.serve.policy import Policy, State
from medusa_cli.serve.service import Service

logger = logging.getLogger(__name__)

MOST_LEFT_EARLY = 4096  # requests that are remembered so

Message = MutableMapping[str, Any]
DRAIN_S = 10.0  # that texts are given to end once no request is left: they were broken off


@dataclass(frozen=True)
class Ask:
    """An HTTP request as it travels.

    id       of the request, by which it can be left
    client   address of who asks
    """

    id: str
    method: str
    path: str
    query: bytes
    headers: Sequence[tuple[bytes, bytes]]
    client: tuple[str, int] | None
    body: bytes

    def scope(self) -> dict[str, Any]:
        """As ASGI tells it to an application."""
        return {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "scheme": "http",
            "method": self.method, "path": self.path, "raw_path": self.path.encode(), "root_path": "",
            "query_string": self.query, "headers": list(self.headers), "client": self.client, "server": None,
        }  # fmt: skip


@dataclass(frozen=True)
class Opening:
    """The first piece of an answer: what comes before its body, and the beginning of that."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes

    @property
    def is_stream(self) -> bool:
        """Whether it is to be let through piece by piece."""
        kinds = (value for name, value in self.headers if name == b"content-type")
        return any(kind.startswith(b"text/event-stream") for kind in kinds)


Piece = Opening | bytes
"""An answer is an Opening and what follows of its body."""


class Replica:
    """An engine and its application."""

    def __init__(self, service: Service, policy: Policy) -> None:
        async def nothing() -> None: ...

        self._state = State(policy, service)
        self._app = make_app(self._state, nothing, nothing)
        self._left: dict[str, asyncio.Event] = {}
        self._left_early: OrderedDict[str, None] = OrderedDict()
        self._running: set[asyncio.Task[None]] = set()

    async def answer(self, ask: Ask) -> AsyncGenerator[Piece, None]:
        """The pieces; who stops reading has left, and rows are freed."""
        if ask.id in self._left_early:
            return
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        left = self._left[ask.id] = asyncio.Event()
        running = asyncio.ensure_future(self._run(ask, sent, left))
        self._running.add(running)  # it outlives who reads: rows are freed at its end
        running.add_done_callback(self._running.discard)
        started: Message | None = None
        try:
            while (message := await sent.get()) is not None:
                if message["type"] == "http.response.start":
                    started = message
                    continue
                body = bytes(message.get("body", b""))
                if started is not None and (body or not message.get("more_body")):
                    yield Opening(started["status"], [(bytes(a), bytes(b)) for a, b in started["headers"]], body)
                    started = None
                elif body:
                    yield body
        finally:
            left.set()
            self._left.pop(ask.id, None)

    async def leave(self, id: str) -> None:
        """Nobody waits for this answer any more. It may have ended, be another replica's, or be on its way here."""
        if (left := self._left.get(id)) is not None:
            left.set()
            return
        self._left_early[id] = None
        if len(self._left_early) > MOST_LEFT_EARLY:
            self._left_early.popitem(last=False)

    def metrics(self) -> str:
        """As Prometheus reads them."""
        return self._state.metrics.text(self._state.service)[0].decode()

    def check_health(self) -> None:
        """Raise RuntimeError where no text is written any more."""
        if self._state.service is None or not self._state.service.worker.is_alive:
            raise RuntimeError("the engine's thread has ended")

    def close(self) -> None:
        """Let texts end."""
        if self._state.service is not None:
            self._state.service.worker.close(DRAIN_S)

    async def _run(self, ask: Ask, sent: "asyncio.Queue[Message | None]", left: asyncio.Event) -> None:
        body: list[Message] = [{"type": "http.request", "body": ask.body, "more_body": False}]

        async def receive() -> Message:
            if body:
                return body.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.put_nowait(message)

        try:
            await self._app(ask.scope(), receive, send)
        # the application has answered that there is an error, and raises it on for who runs it
        except Exception:
            logger.exception("a request failed")
        finally:
            sent.put_nowait(None)
