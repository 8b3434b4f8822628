"""Values of chunks: what a store holds for a key. A header, raw numbers, and a digest over both and the key.

With a secret the digest is an HMAC: nobody without it can make a value that is taken. Nothing in a value is executed,
and sizes are those of the model, whatever a value says.
"""

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_cli.model.cache import Columns
from medusa_cli.prefix.pool import StoreFault

MAGIC = b"medusa-prefix-1\n"


@dataclass(frozen=True)
class Layout:
    """What a chunk of this model looks like.

    layers   number of the layer -> heads, width of keys, width of values
    """

    num_tokens: int
    dtype: torch.dtype
    layers: Mapping[int, tuple[int, int, int]]

    @classmethod
    def of(cls, columns: Columns, num_tokens: int) -> "Layout":
        """That of columns which the model has written."""
        shapes = {
            number: (keys.shape[0], keys.shape[2], values.shape[2]) for number, (keys, values) in columns.layers.items()
        }
        return cls(num_tokens, next(iter(columns.layers.values()))[0].dtype, shapes)

    @property
    def header(self) -> bytes:
        """What a value begins with."""
        layers = [[number, *shape] for number, shape in sorted(self.layers.items())]
        told = {"tokens": self.num_tokens, "dtype": str(self.dtype), "layers": layers}
        return MAGIC + json.dumps(told, separators=(",", ":")).encode() + b"\n"

    @property
    def num_bytes(self) -> int:
        """Of the numbers."""
        return sum(
            heads * self.num_tokens * (keys + values) * self.dtype.itemsize
            for heads, keys, values in self.layers.values()
        )


class Values:
    """Chunks to bytes and back.

    secret   of those who share; None: a digest that tells damage, and not who wrote
    """

    def __init__(self, layout: Layout, secret: bytes | None) -> None:
        self._layout, self._header, self._secret = layout, layout.header, secret

    def written(self, key: bytes, chunk: Columns) -> bytes:
        """The value of a chunk."""
        body = b"".join([self._header, *(_raw(part) for _, parts in sorted(chunk.layers.items()) for part in parts)])
        return body + self._digest(key, body)

    def read(self, key: bytes, value: bytes) -> Columns:
        """The chunk of a value. Raises StoreFault for one that isn't what was written under this key."""
        size = len(self._header) + self._layout.num_bytes
        if len(value) != size + self._digest_size or not value.startswith(self._header):
            raise StoreFault("a chunk of the prefix pool is not one of this model")
        body = memoryview(value)[:size]
        if not hmac.compare_digest(self._digest(key, body), value[size:]):
            raise StoreFault("a chunk of the prefix pool is damaged, or somebody without the secret wrote it")
        return self._columns(bytearray(body[len(self._header) :]))

    def _columns(self, raw: bytearray) -> Columns:
        layout, layers, start = self._layout, {}, 0
        for number, (heads, *widths) in sorted(layout.layers.items()):
            parts = []
            for width in widths:
                count = heads * layout.num_tokens * width
                part = torch.frombuffer(raw, dtype=layout.dtype, count=count, offset=start) if count else torch.empty(0)
                parts.append(part.to(layout.dtype).view(heads, layout.num_tokens, width))
                start += count * layout.dtype.itemsize
            layers[number] = (parts[0], parts[1])
        return Columns(layers)

    def _digest(self, key: bytes, body: bytes | memoryview) -> bytes:
        told = self._begun(key)
        told.update(body)
        return told.digest()

    @property
    def _digest_size(self) -> int:
        return self._begun(b"").digest_size

    def _begun(self, key: bytes) -> "hashlib._Hash | hmac.HMAC":
        # without a secret it has only damage to find, and SHA-1 does that at twice the speed
        if self._secret is None:
            return hashlib.sha1(key, usedforsecurity=False)
        return hmac.new(self._secret, key, hashlib.sha256)


def _raw(part: Tensor) -> bytes:
    return part.contiguous().flatten().view(torch.uint8).numpy().tobytes() if part.numel() else b""
