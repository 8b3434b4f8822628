"""Errors of the API, in the form that OpenAI's clients read: {"error": {"message", "type", "param", "code"}}."""

from collections.abc import Mapping
from typing import Any


class ApiError(Exception):
    """A request that can't be answered as asked.

    status    of HTTP
    message   one sentence
    param     the field that is wrong, if one is
    code      a word that programs look at
    headers   of the answer
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code = status, code
        # both may hold what the client sent
        self.message, self.param = _sendable(message), None if param is None else _sendable(param)
        self.headers = dict(headers or {})

    def document(self) -> dict[str, Any]:
        """As JSON."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


MOST_CHARACTERS = 1000  # of a message


def _sendable(text: str) -> str:
    """Without halves of characters, which no encoding of an answer has, and not without end."""
    return text[:MOST_CHARACTERS].encode("utf-8", "replace").decode()


def unsupported(param: str, what: str) -> ApiError:
    """A part of the API that isn't done here; saying so beats leaving it out in silence."""
    return ApiError(400, f"{what} is not supported", param, "unsupported_parameter")
