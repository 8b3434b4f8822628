"""Answers of a server that speaks OpenAI's chat completions, many requests at once. Knows no tokenizer and no files.

What passes by itself (a busy or failing server, a lost connection, a body that is no answer) is tried again, each time
after a longer wait. The key goes into one header of each request: no message holds it, and no other host gets it, as
redirections are not followed.
"""

import functools
import http.client
import json
import random
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from medusa_cli.data.conversations import Message, is_text
from medusa_cli.errors import DataError
from medusa_cli.util.plain_json import parse_json

_T = TypeVar("_T")
LONGEST_WAIT = 60.0  # seconds between two tries
_MOST_BYTES = 2**25  # of one body: more is no answer of ours
_PASSING = {408, 409, 425, 429}  # and all of 500 and more
_OF_THE_PROMPT = {400, 413, 422}  # this prompt is refused, others may not be


@dataclass(frozen=True)
class Server:
    """Whom to ask, and how.

    url         what /chat/completions is put behind
    model       the name it is served by, "" before `find_model` has told it
    tries       times a request is sent; `first_wait` seconds after the first failure, then twice as many each time
    key         for the Authorization header, or ""
    """

    url: str
    model: str
    temperature: float
    max_tokens: int
    timeout: float
    tries: int
    in_flight: int
    key: str = field(repr=False)
    first_wait: float = 1.0


@dataclass(frozen=True)
class Reply:
    """One answer. `tokens` is the server's own count, 0 when it gave none."""

    text: str
    finish_reason: str
    tokens: int


@dataclass(frozen=True)
class Refused:
    """The server will not answer this prompt."""

    reason: str


class _Passing(Exception):
    """A failure that may pass. `wait`: seconds the server asks for, or None."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait = wait


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirection would carry the key to whatever host it names."""

    def redirect_request(self, *_: Any) -> None:
        return None


def find_model(server: Server) -> str:
    """The name of the only model the server serves. Raises DataError when there are several, or none is told."""
    found = _patiently(server, "/models", None, _names, threading.Event())
    names = found if isinstance(found, list) else []
    if len(names) != 1:
        told = f"serves {len(names)} models ({', '.join(names[:8])})" if names else "doesn't tell which models it has"
        raise DataError(f"the server at {server.url} {told}", "name one: data.server_model=NAME")
    return names[0]


def replies(
    server: Server, asked: Mapping[str, Sequence[Message]]
) -> Generator[tuple[str, Reply | Refused], None, None]:
    """Key and answer of each conversation, in the order they come.

    Raises DataError when the server can't be used or has failed `server.tries` times in a row on one request; what
    had come by then is handed out first. Closing the iterator ends the waiting.
    """
    waiting, done, stop = deque(asked.items()), SimpleQueue[Any](), threading.Event()

    def work() -> None:
        while not stop.is_set():
            try:
                key, messages = waiting.popleft()
            except IndexError:
                return
            try:
                done.put((key, _ask(server, messages, stop)))
            except Exception as error:  # raised where the answers are waited for
                stop.set()  # here, or this thread would ask for the next before anybody looks
                done.put((key, error))

    # daemons: whoever presses Ctrl-C doesn't wait for answers that are on their way
    for _ in range(min(server.in_flight, len(asked))):
        threading.Thread(target=work, daemon=True).start()
    try:
        for _ in range(len(asked)):
            key, outcome = done.get()
            if isinstance(outcome, Exception):
                yield from _rest(done)
                raise outcome
            yield key, outcome
    finally:
        stop.set()


def _rest(done: SimpleQueue[Any]) -> Generator[tuple[str, Reply | Refused], None, None]:
    """The answers that have come and are not handed out yet."""
    while True:
        try:
            key, outcome = done.get_nowait()
        except Empty:
            return
        if not isinstance(outcome, Exception):
            yield key, outcome


def _ask(server: Server, messages: Sequence[Message], stop: threading.Event) -> Reply | Refused:
    """The answer to one conversation."""
    body = {
        "model": server.model,
        "messages": [{"role": message.role, "content": message.content} for message in messages],
        "temperature": server.temperature,
        "max_tokens": server.max_tokens,
        "stream": False,
    }
    return _patiently(server, "/chat/completions", body, _reply, stop)


def _patiently(server: Server, path: str, body: Any, read: Callable[[Any], _T], stop: threading.Event) -> _T | Refused:
    """What `read` finds in the answer to one request, or Refused; tried again while the failure may pass."""
    wait, reason = server.first_wait, ""
    for attempt in range(server.tries):
        try:
            document = _once(server, path, body)
            return document if isinstance(document, Refused) else read(document)
        except _Passing as failure:
            reason = failure.reason
            if attempt + 1 == server.tries:
                break
            # spread, so that requests that failed together don't come back together
            asked_for = wait * random.uniform(0.75, 1.25) if failure.wait is None else failure.wait
            if stop.wait(min(asked_for, LONGEST_WAIT)):
                break
            wait *= 2
    raise DataError(
        f"the server at {server.url} failed {server.tries} times in a row: {_without_key(reason, server)}",
        "what was answered is kept: run the same command again; data.rows sets how many requests are sent at once",
    )


def _once(server: Server, path: str, body: Any) -> Any:
    """One request. Raises _Passing, or DataError for what no waiting mends."""
    headers = {"Accept": "application/json", "Content-Type": "application/json"}
    if server.key:
        headers["Authorization"] = f"Bearer {server.key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, headers)
    try:
        with _opener().open(request, timeout=server.timeout) as response:
            content = response.read(_MOST_BYTES + 1)
    except urllib.error.HTTPError as error:
        return _told(server, error)
    except (OSError, http.client.HTTPException) as error:  # also time-outs
        raise _Passing(str(getattr(error, "reason", "") or error) or type(error).__name__) from error
    try:
        return parse_json(content[:_MOST_BYTES])
    except ValueError as error:
        raise _Passing(f"it answers with what is no JSON ({content[:40]!r})") from error


def _told(server: Server, error: urllib.error.HTTPError) -> Refused:
    """What a status other than 200 means."""
    try:
        body = error.read(4096).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        body = ""
    reason = f"HTTP {error.code}: {_message(body) or error.reason}"
    if error.code in _PASSING or error.code >= 500:
        raise _Passing(reason, _seconds(error.headers.get("Retry-After")))
    if error.code in _OF_THE_PROMPT:
        return Refused(_without_key(f"the server refuses it ({reason})", server))
    hint = "does the URL end as the server's paths do, as in http://localhost:8000/v1, and is data.server_model served?"
    if error.code in (401, 403):
        hint = "give the key in the environment: OPENAI_API_KEY=..."
    raise DataError(f"the server at {server.url} answers {_without_key(reason, server)}", hint)


def _reply(document: Any) -> Reply | Refused:
    """The answer in a body of chat completions; _Passing when it is none."""
    try:
        choice = document["choices"][0]
        text, finish_reason = choice["message"]["content"] or "", choice.get("finish_reason") or "stop"
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise _Passing(f"its answer holds no choices[0].message.content ({json.dumps(document)[:80]})") from error
    if not isinstance(text, str) or not is_text(text):
        raise _Passing("its answer is no text")
    if finish_reason not in ("stop", "length"):
        return Refused(f"the server ended its answer with '{finish_reason}'")
    if not text.strip():
        return Refused("an empty answer")
    usage = document.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return Reply(text, finish_reason, tokens if isinstance(tokens, int) else 0)


def _names(document: Any) -> list[str]:
    """The names in a list of models; none when it is no such list."""
    listed = document.get("data") if isinstance(document, dict) else None
    items = listed if isinstance(listed, list) else []
    return [str(one["id"]) for one in items if isinstance(one, dict) and "id" in one]


def _message(body: str) -> str:
    """The words in the body of a failure, on one line."""
    try:
        error = parse_json(body)["error"]
        body = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        pass
    return " ".join(body.split())[:200]


def _seconds(header: str | None) -> float | None:
    """Retry-After as seconds; a date, or nothing, is None."""
    return float(header) if header and header.isascii() and header.isdigit() else None


def _without_key(text: str, server: Server) -> str:
    """Words of the server, should they quote the key."""
    return text.replace(server.key, "***") if server.key else text


@functools.cache
def _opener() -> urllib.request.OpenerDirector:
    """Follows the system's proxies, and no redirections."""
    return urllib.request.build_opener(_NoRedirect)
