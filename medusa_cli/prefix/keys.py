"""Keys of chunks: each one stands for all tokens up to its end, and for whatever else keys and values depend on."""

import hashlib
from collections.abc import Iterator, Sequence

CHUNK = 64  # tokens of a chunk: few enough that little of a prompt is read again, many enough that keys cost nothing


def seed_of(*parts: str | bytes) -> bytes:
    """What a chain begins with: the parts, none of which runs into the next."""
    told = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        told.update(len(data).to_bytes(8, "big"))
        told.update(data)
    return told.digest()


def keys_of(seed: bytes, ids: Sequence[int]) -> Iterator[bytes]:
    """The key of each whole chunk of a text, made as they are asked for."""
    key = seed
    for start in range(0, len(ids) - CHUNK + 1, CHUNK):
        tokens = b"".join(token.to_bytes(8, "big") for token in ids[start : start + CHUNK])
        key = hashlib.sha256(key + tokens).digest()
        yield key
