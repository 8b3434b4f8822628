"""The header of a GGUF file: what it says of itself, and which tensors it holds. Reads no weights but a few factors.

The layout is that of the GGUF specification, versions 2 and 3, little-endian.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_cli.errors import TargetError

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_SIZES = ("block_count", "embedding_length")  # that the specification asks of every architecture
_F32 = 0
_WORDS = "tokenizer.ggml.tokens"
_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_DAMAGED = "the file is damaged or incomplete: copy or download it again"
_USE_FOLDER = "use the model's own folder of .safetensors, which names the scaling in its config.json"


@dataclass(frozen=True)
class _Tensor:
    """A tensor's type, its count of numbers, and where it begins behind the header."""

    kind: int
    count: int
    offset: int


@dataclass(frozen=True)
class Header:
    """Values by key, arrays left out but the words of the vocabulary, where these are wanted.

    factors   numbers of the small tensors that scale rotary frequencies
    """

    num_tensors: int
    values: Mapping[str, Any]
    factors: Mapping[str, tuple[float, ...] | None]


def refuse_unread(path: Path) -> None:
    """Raise TargetError for what the library would read without a word, and wrongly.

    Parts of a model, scaled positions, and sizes that aren't there: it takes those of some large model instead.
    """
    header = read_header(path)
    if header is None:  # damaged: its loader says how
        return
    parts, number = (_whole(header.values.get(key)) for key in ("split.count", "split.no"))
    if parts > 1:
        raise TargetError(
            f"{path} is part {number + 1} of {parts} of a model",
            f"merge them: llama-gguf-split --merge {_first_part(path, parts)} whole.gguf",
        )
    kind = header.values.get("general.architecture")
    missing = [key for name in _SIZES if (key := f"{kind}.{name}") not in header.values]
    if missing:
        raise TargetError(f"{path} doesn't say its sizes: {', '.join(missing)}", _DAMAGED)
    blocks = max((_whole(value) for key, value in header.values.items() if key.endswith(".block_count")), default=0)
    if blocks > header.num_tensors:
        raise TargetError(
            f"{path} says that it has {blocks:,} layers, and holds {header.num_tensors:,} tensors", _DAMAGED
        )
    scaling = _scaling(header.values)
    if scaling is not None:
        raise TargetError(f"{path} scales its positions ({scaling}), and transformers drops that", _USE_FOLDER)
    for name, factors in header.factors.items():
        if factors is None or any(factor != 1 for factor in factors):
            raise TargetError(
                f"{path} scales its positions by factors of their own ({name}), and transformers drops them",
                _USE_FOLDER,
            )


def read_words(path: Path) -> list[str] | None:
    """The words of the vocabulary in the order of their ids; None when the file isn't whole, or names none."""
    header = read_header(path, words=True)
    return header.values.get(_WORDS) if header else None


def read_header(path: Path, *, words: bool = False) -> Header | None:
    """The header of a file; None when it isn't whole, or of another version."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held:
        try:
            return _Reader(held, _WORDS if words else None).header()
        except (struct.error, UnicodeDecodeError, KeyError, IndexError, OverflowError, RecursionError):
            return None


def _scaling(values: Mapping[str, Any]) -> str | None:
    """What the file says of scaled positions, unless that changes nothing."""
    said = {key: value for key, value in values.items() if ".rope.scal" in key}
    kind = next((value for key, value in said.items() if key.endswith(".rope.scaling.type")), None)
    factors = [value for key, value in said.items() if key.endswith((".factor", ".scale_linear"))]
    if kind == "none" or (kind in (None, "linear", "yarn") and all(factor in (0, 1) for factor in factors)):
        return None
    return ", ".join(f"{key}={value}" for key, value in sorted(said.items()))


def _whole(value: Any) -> int:
    """A value that should be a whole number, 0 where it is none."""
    return value if isinstance(value, int) else 0


def _first_part(path: Path, parts: int) -> str:
    """The name of the first part, which merging starts from."""
    stem, _, number = path.stem.removesuffix(f"-of-{parts:05}").rpartition("-")
    return f"{stem}-00001-of-{parts:05}.gguf" if number.isdigit() else path.name


class _Reader:
    """Walks along a header."""

    def __init__(self, held: mmap.mmap, wanted: str | None = None) -> None:
        """wanted: the key of an array of strings that isn't only gone past."""
        self._held = held
        self._wanted = wanted
        self._at = 4  # behind the magic

    def header(self) -> Header:
        """All of it. Raises one of the errors that `read_header` names where it isn't whole."""
        if self._number("I") not in (2, 3):
            raise KeyError("version")
        num_tensors, num_values = self._number("Q"), self._number("Q")
        values = {key: self._value(self._number("I"), key) for key in (self._string() for _ in range(num_values))}
        tensors = {self._string(): self._tensor() for _ in range(num_tensors)}
        align = _whole(values.get("general.alignment")) or 32
        start = -(-self._at // align) * align
        return Header(
            num_tensors, values, {name: self._factors(tensors[name], start) for name in _FACTORS if name in tensors}
        )

    def _number(self, code: str) -> Any:
        [number] = struct.unpack_from(f"<{code}", self._held, self._at)
        self._at += struct.calcsize(code)
        return number

    def _string(self) -> str:
        length = self._number("Q")
        text = self._held[self._at : self._at + length]
        self._at += length
        return text.decode("utf-8")

    def _value(self, kind: int, key: str = "") -> Any:
        """A value; of arrays None, but the walk goes past them, unless it is the one that is wanted."""
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(_NUMBERS[kind])
        inner, count = self._number("I"), self._number("Q")
        if inner in _NUMBERS:
            self._at += count * struct.calcsize(_NUMBERS[inner])
            return None
        if inner == _STRING and key and key == self._wanted:
            return [self._string() for _ in range(count)]
        if inner == _STRING:
            self._skip_strings(count)
            return None
        for _ in range(count):
            self._value(inner)
        return None

    def _skip_strings(self, count: int) -> None:
        """Go past a vocabulary, which has hundreds of thousands."""
        at, held, length = self._at, self._held, struct.Struct("<Q")
        for _ in range(count):
            at += 8 + length.unpack_from(held, at)[0]
        self._at = at

    def _tensor(self) -> _Tensor:
        count = 1
        for _ in range(self._number("I")):
            count *= self._number("Q")
        return _Tensor(self._number("I"), count, self._number("Q"))

    def _factors(self, tensor: _Tensor, start: int) -> tuple[float, ...] | None:
        """A small tensor's numbers; None when they aren't plain."""
        if tensor.kind != _F32:
            return None
        return struct.unpack_from(f"<{tensor.count}f", self._held, start + tensor.offset)
