"""Log of requests: an id for each, and a line at its end. Neither keys nor prompts nor texts are ever in it."""

import json
import logging
import re
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any, TextIO

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from medusa_cli.serve.errors import ApiError
from medusa_cli.serve.traces import tell_span

NAME_OF_LOG = "medusa.requests"  # not below the package's: who doesn't ask for these lines sees none
logger = logging.getLogger(NAME_OF_LOG)
bugs = logging.getLogger(__name__)

HEADER = "X-Request-Id"
NAME = re.compile(r"[A-Za-z0-9._:-]{1,64}")
MOST_CHARACTERS = 200  # of what a client may write, in a line
MOST_FRAMES = 8  # of an exception
SILENT = ("/health", "/metrics")  # asked every few seconds, by programs


class RequestLog:
    """Middleware around the application: ids in and out, a record at the end of each request, an answer to bugs.

    What a request was about is told through `scope["state"]`: `call`, and `client`.
    """

    def __init__(
        self, app: ASGIApp, is_key: Callable[[str], bool] = lambda word: False, has_traces: bool = False
    ) -> None:
        """is_key: told words that a client wrote; those that are keys are not written down."""
        self._app, self._is_key, self._has_traces = app, is_key, has_traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        name = given if NAME.fullmatch(given) and not self._is_key(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = name
        began, status = time.monotonic(), 0

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = name
            elif self._has_traces and not message.get("more_body"):
                tell_span(name, state)
            await send(message)

        try:
            await self._app(scope, receive, named)
        except Exception as error:
            bugs.error("a request failed", exc_info=error, extra={"fields": {"id": name}})
            if status:  # half an answer is out: the connection has to break
                raise
            told = ApiError(500, "an internal error: see the server's log")
            await JSONResponse(told.document(), 500)(scope, receive, named)
        finally:
            if scope["path"] not in SILENT:
                # 499 where nothing is answered: the client has gone
                fields = self._fields(scope, name, status or 499, time.monotonic() - began)
                logger.info("request", extra={"fields": fields})

    def _fields(self, scope: Scope, name: str, status: int, whole_s: float) -> dict[str, Any]:
        """What is told of a request."""
        state = scope["state"]
        path = "/".join("..." if self._is_key(word) else word for word in scope["path"].split("/"))
        found: dict[str, Any] = {
            "id": name,
            "method": scope["method"][:MOST_CHARACTERS],
            "path": path[:MOST_CHARACTERS],
            "status": status,
            "client": state.get("client") or (scope["client"][0] if scope.get("client") else None),
        }
        if call := state.get("call"):
            usage, told = call.usage(), call.speculation()
            found |= {
                "prompt_tokens": usage["prompt_tokens"],
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "completion_tokens": usage["completion_tokens"],
                **told,
                "finish": [choice.finish_reason or "abort" for choice in call.choices],
                "queue_s": _rounded(call.choices[0].queued_s),
                "first_s": _rounded(call.choices[0].first_s),
            }
        return found | {"whole_s": _rounded(whole_s)}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def as_text(message: str, fields: Mapping[str, Any]) -> str:
    """One line for people; what a client wrote is quoted where it isn't plain."""
    words = "".join(char if char.isprintable() else repr(char)[1:-1] for char in message)
    return " ".join([words, *(f"{name}={_plain(value)}" for name, value in fields.items() if value is not None)])


def as_json(level: str, message: str, fields: Mapping[str, Any]) -> str:
    """One line for programs."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": now, "level": level.lower(), "message": message, **fields}, ensure_ascii=True)


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_plain, value))
    if isinstance(value, str) and not re.fullmatch(r"[\w./:,@%+-]+", value, re.ASCII):
        return json.dumps(value, ensure_ascii=True)
    return str(value)


def place_of(error: BaseException) -> list[str]:
    """Where an exception was raised, the innermost place first. Its words are left out: they may quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__)[: -MOST_FRAMES - 1 : -1]
    return [f"{'/'.join(PurePath(frame.filename).parts[-2:])}:{frame.lineno}:{frame.name}" for frame in frames]


class LineHandler(logging.Handler):
    """Each record of the program as one line: in words, or as JSON.

    show   takes a line in words, for who reads along
    """

    def __init__(self, stream: TextIO | None, show: Callable[[int, str], None]) -> None:
        """stream: JSON goes there; None: words go to `show`."""
        super().__init__()
        self._stream, self._show = stream, show

    def emit(self, record: logging.LogRecord) -> None:
        """Write it."""
        fields = getattr(record, "fields", {})
        if record.exc_info and (error := record.exc_info[1]) is not None:
            fields = {**fields, "error": type(error).__name__, "at": place_of(error)}
        with suppress(OSError, ValueError):  # who reads the log has gone: that is no reason to lose texts
            if self._stream is None:
                self._show(record.levelno, as_text(record.getMessage(), fields))
                return
            self._stream.write(as_json(record.levelname, record.getMessage(), fields) + "\n")
            self._stream.flush()


@contextmanager
def log_lines(handler: LineHandler, level: int) -> Iterator[None]:
    """All that this process logs goes through this handler until the block ends, whoever logs it.

    level   of our own records; of those of libraries, warnings
    """
    ours = [logging.getLogger(name) for name in ("medusa_cli", NAME_OF_LOG)]
    # transformers writes to stderr by itself, and passes nothing on
    rest = [logging.getLogger(), logging.getLogger("transformers")]
    before = [(each, list(each.handlers), each.level, each.propagate) for each in (*ours, *rest)]
    for each in (*ours, *rest):
        each.handlers, each.propagate = [handler], False
    for each in ours:
        each.setLevel(level)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for each, handlers, old, propagate in before:
            each.handlers, each.propagate = handlers, propagate
            each.setLevel(old)
