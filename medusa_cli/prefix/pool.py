"""Prefix pool: chunks of this process, and where one is given, of a store that processes and machines share.

What the store does wrong costs speed: a chunk that can't be had in time is a miss, and its tokens are read as if nobody
had read them before.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from medusa_cli.model.cache import Columns
from medusa_cli.prefix.memory import Memory

FETCHERS = 4  # texts that are looked for in the store at once
AHEAD = 3  # chunks of a text that are asked for at once
WRITES_WAITING = 64  # chunks that wait to be stored; beyond, new ones are left out


class Store(Protocol):
    """Chunks that others may share. Each call may fail or take long; none is made by who writes texts."""

    def fetch(self, key: bytes) -> Columns | None:
        """A chunk, or None. Raises StoreFault."""
        ...

    def store(self, key: bytes, chunk: Columns) -> None:
        """Keep a chunk for others, unless it is there. Raises StoreFault."""
        ...

    def forget(self, keys: Sequence[bytes]) -> None:
        """Drop chunks. Raises StoreFault."""
        ...

    def interrupt(self) -> None:
        """Break off what is under way."""
        ...


class StoreFault(Exception):
    """The store did not do what it was asked."""


@dataclass
class PoolCounts:
    """Since the start: tokens that were looked for, those that were found, and what the store did wrong."""

    queries: int = 0
    hits: int = 0
    faults: int = 0
    fetched: int = 0  # chunks from the store


class PrefixPool:
    """Chunks by their keys.

    tell   told of a fault of the store, in words
    """

    def __init__(
        self, memory: Memory, store: Store | None = None, tell: Callable[[str], None] = lambda _: None
    ) -> None:
        self.memory, self.counts = memory, PoolCounts()
        self._store, self._tell = store, tell
        self._fetching = ThreadPoolExecutor(FETCHERS, "medusa-fetch") if store else None
        self._reading = ThreadPoolExecutor(FETCHERS, "medusa-chunk") if store else None
        self._writing = ThreadPoolExecutor(1, "medusa-store") if store else None
        self._free_fetchers = threading.BoundedSemaphore(FETCHERS)
        self._free_writes = threading.BoundedSemaphore(WRITES_WAITING)

    @property
    def has_store(self) -> bool:
        """Whether chunks may lie elsewhere too."""
        return self._store is not None

    def find(self, keys: Iterable[bytes]) -> list[Columns]:
        """The chunks of a text that this process holds, up to the first gap."""
        return self.memory.find(keys)

    def put(self, key: bytes, chunk: Columns) -> None:
        """Keep a chunk, and let others have it."""
        if self.memory.put(key, chunk):
            self._later(lambda store: store.store(key, chunk))

    def forget(self, keys: Sequence[bytes]) -> None:
        """Drop chunks that turned out to be of no use."""
        self.memory.forget(keys)
        self._later(lambda store: store.forget(keys))

    def prefetch(self, keys: Sequence[bytes]) -> "Future[None] | None":
        """Take what this process lacks of a text out of the store; None where there is nothing to wait for."""
        missing = [key for key in keys if key not in self.memory]
        if self._fetching is None or not missing or not self._free_fetchers.acquire(blocking=False):
            return None
        future = self._fetching.submit(self._fetch, missing)
        future.add_done_callback(lambda _: self._free_fetchers.release())
        return future

    def interrupt(self) -> None:
        """Break off what the store is asked for: somebody has waited long enough."""
        if self._store is not None:
            self.counts.faults += 1
            self._store.interrupt()

    def close(self) -> None:
        """Give up what is under way."""
        for each in (self._fetching, self._reading, self._writing):
            if each is not None:
                each.shutdown(wait=False, cancel_futures=True)
        if self._store is not None:
            self._store.interrupt()

    def _fetch(self, keys: Sequence[bytes]) -> None:
        assert self._store is not None
        assert self._reading is not None
        waiting, asked = iter(keys), deque[tuple[bytes, Future[Columns | None]]]()
        with self._faults_told():
            # one is on its way while another is checked
            asked.extend((key, self._reading.submit(self._store.fetch, key)) for key in islice(waiting, AHEAD))
            while asked:
                key, future = asked.popleft()
                chunk = future.result()
                if chunk is None:
                    break
                self.counts.fetched += 1
                self.memory.put(key, chunk)
                asked.extend((key, self._reading.submit(self._store.fetch, key)) for key in islice(waiting, 1))
        for _, future in asked:
            future.cancel()

    def _later(self, do: Callable[[Store], None]) -> None:
        """Ask the store on a thread of its own; where too much waits already, not at all."""
        store, writing = self._store, self._writing
        if store is None or writing is None or not self._free_writes.acquire(blocking=False):
            return

        def run() -> None:
            try:
                with self._faults_told():
                    do(store)
            finally:
                self._free_writes.release()

        with suppress(RuntimeError):  # it is closed
            writing.submit(run)

    @contextmanager
    def _faults_told(self) -> Iterator[None]:
        """Within, a fault of the store is counted and told, and ends what was asked."""
        try:
            yield
        except StoreFault as fault:
            self.counts.faults += 1
            self._tell(str(fault))
