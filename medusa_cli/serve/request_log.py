"""Log of requests: an id for each, and a line at its end. Neither keys nor prompts nor texts are ever in it."""

import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

NAME_OF_LOG = "medusa.requests"  # not below the package's: who doesn't ask for these lines sees none
logger = logging.getLogger(NAME_OF_LOG)

HEADER = "X-Request-Id"
NAME = re.compile(r"[A-Za-z0-9._:-]{1,64}")
MOST_CHARACTERS = 200  # of what a client may write, in a line
SILENT = ("/health", "/metrics")  # asked every few seconds, by programs


class RequestLog:
    """Middleware around the application: ids in and out, and a record at the end of each request.

    What a request was about is told through `scope["state"]`: `call`, and `client`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        name = given if NAME.fullmatch(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = name
        began, status = time.monotonic(), 499  # where nothing is answered: the client has gone

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = name
            await send(message)

        try:
            await self._app(scope, receive, named)
        except Exception:
            status = 500
            raise
        finally:
            if scope["path"] not in SILENT:
                logger.info("request", extra={"fields": _fields(scope, name, status, time.monotonic() - began)})


def _fields(scope: Scope, name: str, status: int, whole_s: float) -> dict[str, Any]:
    """What is told of a request."""
    state = scope["state"]
    found: dict[str, Any] = {
        "id": name,
        "method": scope["method"][:MOST_CHARACTERS],
        "path": scope["path"][:MOST_CHARACTERS],
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
    return " ".join([message, *(f"{name}={_plain(value)}" for name, value in fields.items() if value is not None)])


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
        if self._stream is None:
            self._show(record.levelno, as_text(record.getMessage(), fields))
            return
        if record.exc_info and record.exc_info[1] is not None:
            fields = {**fields, "error": f"{type(record.exc_info[1]).__name__}: {record.exc_info[1]}"}
        self._stream.write(as_json(record.levelname, record.getMessage(), fields) + "\n")
        self._stream.flush()
