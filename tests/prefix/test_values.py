"""Values of chunks: written, read back bit for bit, and refused when anything in them is not as it was written."""

import pickle

import pytest
import torch

from medusa_cli.model.cache import Columns
from medusa_cli.prefix.pool import StoreFault
from medusa_cli.prefix.values import Layout, Values

KEY = b"k" * 32


def chunk(dtype: torch.dtype = torch.float32) -> Columns:
    rng = torch.Generator().manual_seed(1)
    layers = {
        number: (torch.randn(heads, 8, 4, generator=rng).to(dtype), torch.randn(heads, 8, 6, generator=rng).to(dtype))
        for number, heads in ((0, 2), (1, 3))
    }
    taps = torch.randn(2, 8, 5, generator=rng).to(dtype)
    return Columns({**layers, 2: (taps, taps[..., :0])})


def values(secret: bytes | None = None, dtype: torch.dtype = torch.float32) -> Values:
    return Values(Layout.of(chunk(dtype), 8), secret)


@pytest.mark.parametrize("secret", [None, b"secret"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_value_comes_back_bit_for_bit(dtype: torch.dtype, secret: bytes | None) -> None:
    mine = values(secret, dtype)
    found = mine.read(KEY, mine.written(KEY, chunk(dtype)))
    for number, parts in chunk(dtype).layers.items():
        for part, other in zip(parts, found.layers[number], strict=True):
            assert part.dtype == other.dtype
            assert torch.equal(part, other)


def test_every_changed_byte_is_noticed() -> None:
    mine = values()
    value = mine.written(KEY, chunk())
    for place in range(0, len(value), 7):
        damaged = bytearray(value)
        damaged[place] ^= 1
        with pytest.raises(StoreFault):
            mine.read(KEY, bytes(damaged))


@pytest.mark.parametrize("value", [b"", b"x", b"medusa-prefix-1\n", pickle.dumps({"a": 1}), b"\0" * 4000], ids=range(5))
def test_what_is_no_chunk_is_refused(value: bytes) -> None:
    with pytest.raises(StoreFault, match="not one of this model"):
        values().read(KEY, value)


def test_a_value_is_refused_under_another_key_of_another_size_and_of_another_model() -> None:
    mine = values()
    value = mine.written(KEY, chunk())
    for wrong in (value[:-1], value + b"\0", value * 2):
        with pytest.raises(StoreFault, match="not one of this model"):
            mine.read(KEY, wrong)
    with pytest.raises(StoreFault, match="damaged"):
        mine.read(b"l" * 32, value)
    with pytest.raises(StoreFault, match="not one of this model"):
        values(dtype=torch.bfloat16).read(KEY, value)


def test_who_has_no_secret_can_write_nothing_that_is_read() -> None:
    signed = values(b"secret")
    for stranger in (values(), values(b"another")):
        with pytest.raises(StoreFault, match="without the secret|not one of this model"):
            signed.read(KEY, stranger.written(KEY, chunk()))
