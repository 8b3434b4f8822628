"""Chunks in Redis: written once, with a life time. A server that fails is left alone for a while, then tried again."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from medusa_cli.errors import DataError
from medusa_cli.model.cache import Columns
from medusa_cli.prefix.pool import StoreFault
from medusa_cli.prefix.values import Values
from medusa_cli.util.optional import need

ANSWER_S = 0.5  # that one answer may take
FIRST_REST_S, LONGEST_REST_S = 1.0, 60.0  # that a server which failed is left alone; doubled with every failure
NAME = b"medusa:prefix:"


class RedisStore:
    """A server that holds chunks for whoever knows their keys.

    url          redis://…, rediss://… or unix://…
    lifetime_s   after which a chunk is gone
    """

    def __init__(
        self, url: str, values: Values, lifetime_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises DataError for an address that is none; asks the server for nothing."""
        need("redis", "redis")
        import redis

        try:
            self._client: Any = redis.Redis.from_url(
                url, socket_timeout=ANSWER_S, socket_connect_timeout=ANSWER_S, retry=None, max_connections=16
            )
            pool = self._client.connection_pool
            pool.connection_class(**pool.connection_kwargs)  # options of the address are looked at here
        except (ValueError, TypeError) as error:
            raise DataError(f"--prefix-pool: {error}", "write redis://host:port/number") from error
        self._values, self._lifetime_ms = values, round(lifetime_s * 1000)
        self._rests = Rests(clock)

    def fetch(self, key: bytes) -> Columns | None:
        """As `Store`. A value that is no chunk is dropped, so that a right one can take its place."""
        value = self._asked(lambda client: client.get(NAME + key.hex().encode()))
        if value is None:
            return None
        try:
            if not isinstance(value, bytes):
                raise StoreFault("the prefix pool's server answered with something else than a value")
            return self._values.read(key, value)
        except StoreFault:
            self._asked(lambda client: client.delete(NAME + key.hex().encode()))
            raise

    def store(self, key: bytes, chunk: Columns) -> None:
        """As `Store`."""
        name = NAME + key.hex().encode()
        if self._asked(lambda client: client.exists(name)) == 0:  # values are large, and most are there
            value = self._values.written(key, chunk)
            self._asked(lambda client: client.set(name, value, nx=True, px=self._lifetime_ms))

    def forget(self, keys: Sequence[bytes]) -> None:
        """As `Store`."""
        if keys:
            self._asked(lambda client: client.delete(*(NAME + key.hex().encode() for key in keys)))

    def interrupt(self) -> None:
        """As `Store`: connections are closed under whoever reads from them."""
        self._rests.failed()
        self._client.connection_pool.disconnect()

    def _asked(self, ask: Callable[[Any], Any]) -> Any:
        """An answer. Raises StoreFault; None while the server is left alone."""
        if self._rests.resting:
            return None
        try:
            found = ask(self._client)
        except Exception as error:  # in what ways rubbish breaks a parser, nobody can list
            self._rests.failed()
            raise StoreFault(f"the prefix pool's server failed ({type(error).__name__}): {error}") from error
        self._rests.worked()
        return found


class Rests:
    """How long a server that failed is left alone."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._until, self._next = clock, 0.0, FIRST_REST_S

    @property
    def resting(self) -> bool:
        """Whether it is not to be asked now."""
        return self._clock() < self._until

    def failed(self) -> None:
        """It failed: leave it alone, longer than the last time."""
        if not self.resting:  # several threads may fail at once
            self._until = self._clock() + self._next
            self._next = min(LONGEST_REST_S, 2 * self._next)

    def worked(self) -> None:
        """It answered: the next rest is short again."""
        self._next = FIRST_REST_S
