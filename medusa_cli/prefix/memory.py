"""Memory of a prefix pool: chunks in this process, so many bytes of them at most. Safe on several threads."""

import threading
from collections import OrderedDict
from collections.abc import Iterable

from medusa_cli.model.cache import Columns


class Memory:
    """Chunks by their keys. Which was of no use for the longest time goes first.

    most_bytes   of all chunks together
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.num_bytes = most_bytes, 0
        self._chunks: OrderedDict[bytes, Columns] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, key: bytes) -> bool:
        return key in self._chunks

    def __len__(self) -> int:
        return len(self._chunks)

    def find(self, keys: Iterable[bytes]) -> list[Columns]:
        """The chunks of a text, from its first one to the first that isn't here."""
        found = []
        with self._lock:
            for key in keys:
                if key not in self._chunks:
                    break
                found.append(key)
            # the last one first: a chunk is of no use without those before it, so it must be the first to go
            for key in reversed(found):
                self._chunks.move_to_end(key)
            return [self._chunks[key] for key in found]

    def put(self, key: bytes, chunk: Columns) -> bool:
        """Keep a chunk; whether it is new here. One that is larger than all the room is left out."""
        with self._lock:
            if key in self._chunks or chunk.num_bytes > self.most_bytes:
                return False
            self._chunks[key] = chunk
            self.num_bytes += chunk.num_bytes
            while self.num_bytes > self.most_bytes:
                _, gone = self._chunks.popitem(last=False)
                self.num_bytes -= gone.num_bytes
            return True

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop these chunks."""
        with self._lock:
            for key in keys:
                gone = self._chunks.pop(key, None)
                self.num_bytes -= gone.num_bytes if gone is not None else 0
