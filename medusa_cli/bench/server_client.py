"""Client of a server that speaks OpenAI's API: chats as streams, timed, many at once. Knows no table and no files."""

import asyncio
import json
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from medusa_cli.bench.prompt_set import Question
from medusa_cli.errors import DataError
from medusa_cli.util.optional import need
from medusa_cli.util.plain_json import parse_json

CONNECT_S = 10.0


@dataclass(frozen=True)
class ServerArm:
    """A server, asked in one way.

    url    what /chat/completions is put behind
    key    for the Authorization header, or None
    more   fields beside the usual ones
    """

    name: str
    url: str
    model: str
    key: str | None = field(default=None, repr=False)
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        """Of each request."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


@dataclass(frozen=True)
class Load:
    """How requests come: so many clients, each with one request at a time, or so many requests a second (Poisson)."""

    clients: int | None = None
    rate: float | None = None

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"{self.clients}" if self.clients is not None else f"{self.rate:g}/s"


@dataclass(frozen=True)
class Heard:
    """What came of one request.

    fault     in words, where no whole answer came; status 0: nothing was answered
    first_s   from sending to the first words, None where none came
    whole_s   to the end
    gaps_s    between events that brought words
    tokens    the server's own count
    steps     forwards of the text, where the server tells
    """

    arm: str
    id: str
    status: int
    fault: str | None = None
    text: str = ""
    first_s: float | None = None
    whole_s: float = 0.0
    gaps_s: Sequence[float] = ()
    tokens: int = 0
    steps: int | None = None


def find_served(url: str, key: str | None) -> str:
    """The name of the only model that a server has. Raises DataError where there is none, several, or no server."""
    httpx = need("httpx", "serve")
    try:
        answer = httpx.get(f"{url}/models", headers=ServerArm("", url, "", key).headers, timeout=CONNECT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DataError(
            f"nothing answers at {url}: {error}", "start it first: medusa serve; and check --url"
        ) from error
    if answer.status_code != 200:
        raise DataError(
            f"{url}/models answers {answer.status_code}: {_told(answer.content)}", "check --url and --api-key"
        )
    try:
        names = [str(model["id"]) for model in parse_json(answer.content)["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{url}/models answers with something else than models", "check --url: …/v1") from error
    if len(names) != 1:
        raise DataError(f"{url} serves {len(names)} models ({', '.join(names[:8])})", "name one: --served-model NAME")
    return names[0]


async def run_load(
    arm: ServerArm, questions: Sequence[Question], load: Load, max_tokens: int, seed: int, tell: Callable[[], None]
) -> list[Heard]:
    """Ask all of these, as the load says."""
    httpx = need("httpx", "serve")
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(600.0, connect=CONNECT_S)
    async with httpx.AsyncClient(headers=arm.headers, limits=limits, timeout=timeout) as client:

        async def one(question: Question) -> Heard:
            found = await _ask(client, arm, question, max_tokens)
            tell()
            return found

        if load.rate is not None:
            return await _arriving(questions, load.rate, random.Random(seed), one)
        return await _side_by_side(questions, load.clients or 1, one)


async def _side_by_side(questions: Sequence[Question], clients: int, one: Callable[[Question], Any]) -> list[Heard]:
    waiting, heard = deque(questions), list[Heard]()

    async def client() -> None:
        while waiting:
            heard.append(await one(waiting.popleft()))

    await asyncio.gather(*(client() for _ in range(clients)))
    return heard


async def _arriving(
    questions: Sequence[Question], rate: float, rng: random.Random, one: Callable[[Question], Any]
) -> list[Heard]:
    tasks = []
    for question in questions:
        tasks.append(asyncio.ensure_future(one(question)))
        await asyncio.sleep(rng.expovariate(rate))
    return list(await asyncio.gather(*tasks))


async def _ask(client: Any, arm: ServerArm, question: Question, max_tokens: int) -> Heard:
    """One chat, as a stream."""
    httpx = need("httpx", "serve")
    body = {
        "model": arm.model,
        "messages": [{"role": "user", "content": question.text}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **arm.more,
    }
    reading = _Reading(time.perf_counter())
    try:
        async with client.stream("POST", f"{arm.url}/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                return Heard(arm.name, question.id, answer.status_code, _told(await answer.aread()))
            async for line in answer.aiter_lines():
                reading.take(line)
    except httpx.HTTPError as error:
        return Heard(arm.name, question.id, 0, f"{type(error).__name__}: {error}")
    return reading.heard(arm.name, question.id)


class _Reading:
    """A stream as it comes."""

    def __init__(self, began: float) -> None:
        self._began = self._last = began
        self._first: float | None = None
        self._gaps: list[float] = []
        self._words: list[str] = []
        self._tokens, self._steps, self._is_whole = 0, None, False
        self._fault: str | None = None

    def take(self, line: str) -> None:
        """One line of it."""
        if not line.startswith("data:"):
            return
        data = line[5:].strip()
        if data == "[DONE]":
            self._is_whole = True
            return
        try:
            self._event(json.loads(data))
        except (ValueError, KeyError, TypeError, AttributeError):
            self._fault = f"an event that is none of a chat: {data[:80]}"

    def _event(self, event: Any) -> None:
        if "error" in event:
            self._fault = str(event["error"].get("message", event["error"]))
            return
        words = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        if words:
            now = time.perf_counter()
            if self._first is None:
                self._first = now - self._began
            else:
                self._gaps.append(now - self._last)
            self._last = now
            self._words.append(words)
        if any(choice.get("finish_reason") for choice in event["choices"]):
            self._is_whole = True  # some servers send no [DONE]
        if usage := event.get("usage"):
            self._tokens = int(usage["completion_tokens"])
        if told := event.get("speculation"):
            self._steps = told.get("num_steps")

    def heard(self, arm: str, name: str) -> Heard:
        """All of it."""
        fault = self._fault or (None if self._is_whole else "the stream ended before its text did")
        whole = time.perf_counter() - self._began
        text = "".join(self._words)
        return Heard(arm, name, 200, fault, text, self._first, whole, self._gaps, self._tokens, self._steps)


def _told(body: bytes) -> str:
    """What an error says, in OpenAI's form or another."""
    try:
        told = parse_json(body)["error"]
        return str(told["message"] if isinstance(told, dict) else told)[:200]
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace").strip() or "nothing"
