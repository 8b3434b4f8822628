"""HTTP in front of several replicas: who may ask, which replica is asked, and what happens when it is lost.

An answer is asked for again, of another replica, while nothing of it has been let through: a whole answer is let
through at once, a stream from its first event on. Texts don't depend on who writes them, so nobody can tell.
"""

import asyncio
import hashlib
import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, Protocol

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from medusa_cli.serve.answers import EventStream, event_of, until_gone
from medusa_cli.serve.app import bare_app
from medusa_cli.serve.errors import ApiError
from medusa_cli.serve.policy import Policy, body_of, check_key
from medusa_cli.serve.replica import Ask, Opening, Piece
from medusa_cli.util.plain_json import parse_json

MOST_TRIES = 3  # replicas that one request may be lost with: it might be what ends them
END = b"data: [DONE]\n\n"
FIRST_WORDS = 512  # characters of a plain prompt that say where it goes
FIRST_IDS = 128


class Lost(Exception):
    """The replica that was asked has ended."""


class Full(Exception):
    """As many requests wait as may."""


class Unready(Exception):
    """No replica runs yet, or any more."""


class Replicas(Protocol):
    """Those who answer."""

    def ask(self, ask: Ask, key: str) -> AsyncGenerator[Piece, None]:
        """An answer; requests of one key go to one replica while it has room. Raises Lost, Full, Unready."""

    async def running(self) -> int:
        """How many there are."""

    async def metrics(self) -> Mapping[str, str]:
        """What each has counted, by its name."""


class Front:
    """What the routes share."""

    def __init__(self, policy: Policy, replicas: Replicas) -> None:
        self.policy, self.replicas = policy, replicas
        self._registry = CollectorRegistry()
        self._of_replicas = _Labelled()
        self._registry.register(self._of_replicas)
        self._again = self._counter("requests_asked_again", "Requests whose replica ended before a word was sent.")
        self._broken = self._counter("streams_broken_off", "Streams whose replica ended after their first word.")

    def _counter(self, name: str, what: str) -> Counter:
        return Counter(f"medusa:{name}", what, registry=self._registry)

    async def pieces(self, ask: Ask, key: str) -> AsyncGenerator[Piece, None]:
        """An answer: whole in its Opening, or a stream. Raises ApiError before the first piece only."""
        for _ in range(MOST_TRIES):
            begun, sent = False, b""
            try:
                async with aclosing(self.replicas.ask(ask, key)) as answer:
                    async for piece in _joined(answer):
                        begun, sent = True, piece.body if isinstance(piece, Opening) else piece
                        yield piece
                return
            except Lost:
                if sent.endswith(END):  # all of it is written: how its writer ended is no matter
                    return
                if begun:  # the status is sent already
                    self._broken.inc()
                    lost = ApiError(500, "the text is lost: the replica that wrote it ended", None, "replica_lost")
                    yield event_of(lost.document()).encode()
                    return
                self._again.inc()
            except Full as error:
                headers = {"Retry-After": str(self.policy.retry_s)}
                raise ApiError(
                    429, "as many requests wait as may: try again later", None, "queue_full", headers
                ) from error
            except Unready as error:
                told = "the model is being loaded"
                raise ApiError(503, told, headers={"Retry-After": "5"}) from error
        raise ApiError(503, f"{MOST_TRIES} replicas ended while they wrote this", None, "replica_lost")

    async def metrics(self) -> bytes:
        """Those of all replicas, and what was lost."""
        self._of_replicas.texts = await self.replicas.metrics()
        return generate_latest(self._registry)


async def _joined(answer: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
    """The pieces of a stream; anything else in one."""
    opening: Opening | None = None
    body = b""
    async for piece in answer:
        if isinstance(piece, Opening):
            if piece.is_stream:
                yield piece
            else:
                opening, body = piece, piece.body
        elif opening is None:
            yield piece
        else:
            body += piece
    if opening is not None:
        yield Opening(opening.status, opening.headers, body)


def make_front(
    policy: Policy, replicas: Replicas, on_start: Callable[[], Awaitable[None]], on_end: Callable[[], Awaitable[None]]
) -> FastAPI:
    """The application; what it doesn't know itself it asks a replica."""
    app, front = bare_app(policy, on_start, on_end), Front(policy, replicas)

    @app.get("/health")
    async def health() -> Response:
        running = await replicas.running()
        return _json({"status": "ok" if running else "loading", "replicas": running}, 200 if running else 503)

    if policy.has_metrics:

        @app.get("/metrics")
        async def metrics() -> Response:
            return Response(await front.metrics(), media_type=CONTENT_TYPE_LATEST)

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def relay(request: Request) -> Response:
        return await _relay(front, request)

    return app


def _json(document: Any, status: int) -> Response:
    return Response(json.dumps(document), status, media_type="application/json")


async def _relay(front: Front, request: Request) -> Response:
    if request.url.path.startswith("/v1/"):  # a replica asks too; here it costs none of its time
        check_key(front.policy, request)
    ask = await _ask_of(request, front.policy.body_bytes)
    pieces = front.pieces(ask, routing_key(ask))
    first = asyncio.ensure_future(anext(pieces, None))
    gone = asyncio.ensure_future(until_gone(request))
    await asyncio.wait({first, gone}, timeout=front.policy.timeout_s, return_when=asyncio.FIRST_COMPLETED)
    gone.cancel()
    if not first.done():
        left = gone.done()
        first.cancel()
        with suppress(asyncio.CancelledError):
            await first
        await pieces.aclose()
        if left:
            return Response(status_code=499)  # nobody reads it
        told_s = f"{front.policy.timeout_s:g}"
        raise ApiError(408, f"the answer took longer than {told_s} s", None, "timeout")
    opening = first.result()
    if not isinstance(opening, Opening):
        raise ApiError(500, "a replica gave no answer")
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in opening.headers}
    if not opening.is_stream:
        await pieces.aclose()
        return Response(opening.body, opening.status, headers)
    return EventStream(_bytes(opening, pieces), lambda: None, headers)


async def _bytes(opening: Opening, pieces: AsyncGenerator[Piece, None]) -> AsyncIterator[bytes]:
    """A stream's body, piece by piece."""
    async with aclosing(pieces):
        yield opening.body
        async for piece in pieces:
            assert isinstance(piece, bytes)
            yield piece


async def _ask_of(request: Request, most: int) -> Ask:
    scope = request.scope
    return Ask(
        uuid.uuid4().hex,
        request.method,
        scope["path"],
        scope["query_string"],
        list(scope["headers"]),
        tuple(scope["client"]) if scope.get("client") else None,
        await body_of(request, most),
    )


def routing_key(ask: Ask) -> str:
    """What requests share that go to one replica: whose they are, and how their prompt begins.

    Of a chat that is all up to the user's first message, so all turns of a conversation share it.
    """
    try:
        document = parse_json(ask.body)
    except ValueError:
        document = None
    begins = _beginning(document) if isinstance(document, dict) else None
    if begins is None:
        return ask.id
    key = next((value for name, value in ask.headers if name == b"authorization"), b"")
    told = json.dumps(begins, sort_keys=True).encode("utf-8", "surrogatepass")
    return hashlib.sha256(hashlib.sha256(key).digest() + told).hexdigest()


def _beginning(document: Mapping[str, Any]) -> Any:
    messages, prompt = document.get("messages"), document.get("prompt")
    if isinstance(messages, list):
        users = (n for n, each in enumerate(messages) if isinstance(each, dict) and each.get("role") == "user")
        return messages[: next(users, 0) + 1]
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt[:FIRST_WORDS]
    return prompt[:FIRST_IDS] if isinstance(prompt, list) else None


class _Labelled(Collector):
    """Metrics of all replicas, each number with its replica's name."""

    texts: Mapping[str, str] = {}

    def collect(self) -> Sequence[Metric]:
        """One family for each name."""
        families: dict[str, Metric] = {}
        for replica, text in self.texts.items():
            for family in text_string_to_metric_families(text):
                if family.name.endswith("_created"):  # times, which a counter of our own would bring again
                    continue
                kept = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    labels = {**sample.labels, "replica": replica}
                    kept.add_sample(sample.name, labels, sample.value, sample.timestamp)
        return list(families.values())
