"""One answer: a request becomes texts of the engine, sent whole or as server-sent events while they grow."""

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from medusa_cli.errors import MedusaError
from medusa_cli.serve import documents
from medusa_cli.serve.errors import ApiError
from medusa_cli.serve.metrics import Followed
from medusa_cli.serve.policy import State, body_of, digest_of, service_for
from medusa_cli.serve.schema import Wanted, parsed
from medusa_cli.serve.service import Call, Service
from medusa_cli.serve.worker import Busy, Closed, Logprob, News
from medusa_cli.util.plain_json import parse_json

PREFETCH_S = 1.0  # that a request waits for chunks which are kept elsewhere

Following = AsyncGenerator[tuple[int, str, list[Logprob] | None], None]
"""(index of the text, words, logprobs) as texts grow"""


async def _document(request: Request, most: int) -> Any:
    """The JSON of a request. Raises ApiError for one that is too large, or none."""
    try:
        return parse_json(await body_of(request, most))
    except (ValueError, UnicodeDecodeError) as error:
        raise ApiError(400, "the body is no JSON") from error


async def answer(state: State, request: Request, kind: type[Wanted]) -> Response:
    service = service_for(state, request)
    wanted = parsed(kind, await _document(request, state.policy.body_bytes))
    news: asyncio.Queue[News] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def deliver(each: News) -> None:
        loop.call_soon_threadsafe(news.put_nowait, each)

    client = _client(request)
    request.state.client = f"key {client[:8]}" if request.headers.get("authorization") else client
    # where nobody has a key, nobody's texts are hidden from others; an address is no proof of anything
    owner = client if state.policy.keys else ""
    call = await asyncio.to_thread(service.call, wanted, client, deliver, owner)
    await _prefetched(service, call)
    try:
        service.worker.submit(call.asked)
    except Busy as error:
        headers = {"Retry-After": str(state.policy.retry_s)}
        raise ApiError(429, "as many requests wait as may: try again later", None, "queue_full", headers) from error
    except Closed as error:
        raise ApiError(503, "the server is about to end") from error
    except MedusaError as error:
        raise ApiError(400, error.message) from error
    told, request.state.call = state.metrics.follow(call), call
    following = _following(state, call, news, told)
    if wanted.stream:
        return EventStream(_events(service, call, following), lambda: service.worker.cancel(call.asked))
    return await _whole(service, call, following, request)


async def _prefetched(service: Service, call: Call) -> None:
    """Wait for what the prefix pool's store holds of the prompts, but not for long."""
    future = service.worker.prefetch(call.asked)
    if future is None:
        return
    _, late = await asyncio.wait({asyncio.wrap_future(future)}, timeout=PREFETCH_S)
    if late:
        assert service.worker.prefixes is not None
        await asyncio.to_thread(service.worker.prefixes.pool.interrupt)


class EventStream(StreamingResponse):
    """Server-sent events; `free` is called at their end, also where the client left before the first."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[str] | AsyncIterator[bytes],
        free: Callable[[], None],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(events, headers=headers)
        self._free = free

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._free()


def _client(request: Request) -> str:
    """Whose turn it is: by key where there is one, else by address."""
    key = request.headers.get("authorization")
    return digest_of(key).hex() if key else request.client.host if request.client else uuid.uuid4().hex


async def _following(state: State, call: Call, news: asyncio.Queue[News], told: Followed) -> Following:
    """(index, words, logprobs) as texts grow; who stops reading frees the rows. Raises ApiError."""
    assert state.service is not None
    left, ends = len(call.choices), asyncio.get_running_loop().time() + state.policy.timeout_s
    try:
        while left:
            # a time-out around all of it would cancel whoever reads, in the middle of sending
            try:
                each = await asyncio.wait_for(news.get(), ends - asyncio.get_running_loop().time())
            except TimeoutError as error:
                told_s = f"{state.policy.timeout_s:g}"
                raise ApiError(408, f"the answer took longer than {told_s} s", None, "timeout") from error
            if each.error is not None:
                raise ApiError(500, each.error, None, "generation_failed")
            words = call.choices[each.index].feed(each)
            left -= each.finish_reason is not None
            told.saw(each)
            yield each.index, words, each.logprobs
    finally:
        state.service.worker.cancel(call.asked)
        told.ended()


async def _whole(
    service: Service,
    call: Call,
    following: Following,
    request: Request,
) -> Response:
    """All of it at once; a client that has gone is noticed."""
    texts, logprobs = [""] * len(call.choices), [list[Logprob]() for _ in call.choices]

    async def gather() -> None:
        async with aclosing(following):
            async for index, words, more in following:
                texts[index] += words
                logprobs[index] += more or []

    gathering = asyncio.ensure_future(gather())
    gone = asyncio.ensure_future(until_gone(request))
    await asyncio.wait({gathering, gone}, return_when=asyncio.FIRST_COMPLETED)
    if not gathering.done():
        gathering.cancel()
        with suppress(asyncio.CancelledError):
            await gathering
        return Response(status_code=499)  # nobody reads it
    gone.cancel()
    gathering.result()
    choices = [
        documents.choice_of(call, index, texts[index], logprobs[index], service.words_of) for index in range(len(texts))
    ]
    document = {**documents.head(call, service.name, chunk=False), "choices": choices, **documents.ended(call)}
    return JSONResponse(document)


async def until_gone(request: Request) -> None:
    """Return when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(service: Service, call: Call, following: Following) -> AsyncIterator[str]:
    """The answer as server-sent events."""
    head = documents.head(call, service.name, chunk=True)
    begun: set[int] = set()
    extra: dict[str, Any] = {"usage": None} if call.wanted.includes_usage else {}
    try:
        async with aclosing(following):
            async for index, words, logprobs in following:
                first = index not in begun
                steps = call.choices[index].steps_told(service.words_of)
                if words or logprobs or steps or first or call.choices[index].finish_reason:
                    begun.add(index)
                    choice = documents.chunk_of(call, index, words, logprobs, service.words_of, first=first)
                    if call.wanted.includes_steps:
                        choice["steps"] = steps
                    yield event_of({**head, "choices": [choice], **extra})
        if call.wanted.includes_usage:
            yield event_of({**head, "choices": [], **documents.ended(call)})
        yield "data: [DONE]\n\n"
    except ApiError as error:  # the status is sent already
        yield event_of(error.document())


def event_of(document: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(document, ensure_ascii=False, separators=(',', ':'))}\n\n"
