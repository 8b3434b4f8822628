"""What a server allows, and what its routes share: keys, sizes, the service once it is there."""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastapi import Request
from starlette.requests import ClientDisconnect

from medusa_cli.serve.errors import ApiError
from medusa_cli.serve.metrics import Metrics
from medusa_cli.serve.service import Service


@dataclass(frozen=True)
class Policy:
    """What the server allows.

    keys          sha256 of each API key; none: no key is asked for
    body_bytes    of a request at most
    timeout_s     that a whole answer may take
    retry_s       that a client is told to wait where the queue is full
    origins       web pages that may call (CORS)
    has_metrics   whether /metrics is there
    has_page      whether the page at / is there
    has_traces    whether requests become OpenTelemetry spans
    """

    keys: Sequence[bytes] = ()
    body_bytes: int = 4 * 2**20
    timeout_s: float = 600.0
    retry_s: int = 1
    origins: Sequence[str] = ()
    has_metrics: bool = True
    has_page: bool = True
    has_traces: bool = False


@dataclass
class State:
    """What routes share; `service` is None while the model is being loaded."""

    policy: Policy
    service: Service | None = None
    fault: str | None = None
    metrics: Metrics = field(default_factory=Metrics)


def check_key(policy: Policy, request: Request) -> None:
    """Raise ApiError for a key that isn't one of those; every one is compared, in constant time."""
    if not policy.keys:
        return
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    given = digest_of(key)
    known = [hmac.compare_digest(given, each) for each in policy.keys]
    if scheme.lower() != "bearer" or not any(known):
        raise ApiError(401, "no valid API key was given", None, "invalid_api_key", {"WWW-Authenticate": "Bearer"})


def digest_of(key: str) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


async def body_of(request: Request, most: int) -> bytes:
    """All of a request's body. Raises ApiError for one that is too large."""
    held = bytearray()
    try:
        async for piece in request.stream():
            held += piece
            if len(held) > most:
                raise ApiError(413, f"the body has more than {most} bytes", None, "body_too_large")
    except ClientDisconnect as error:  # nobody reads this
        raise ApiError(400, "the body ends too early") from error
    return bytes(held)


def service_for(state: State, request: Request) -> Service:
    """What answers, for who may ask. Raises ApiError."""
    check_key(state.policy, request)
    if state.service is None:
        raise ApiError(503, state.fault or "the model is being loaded", headers={"Retry-After": "5"})
    return state.service
