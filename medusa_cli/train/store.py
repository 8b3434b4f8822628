"""The folder of hidden states: appended to while the target writes or reads, and never left half-written.

It holds store.json (whose states they are), samples.jsonl (one line a sample) and, for all samples end to end,
hidden.f16 [T, H], ids.i32 [T] and supervised.u8 [T]; for heads that see inner states at every place whole texts, with
taps.f16 [T, X] unless the target is to be run again. This file knows no model and no heads.

Shape letters: T places of all samples end to end, H hidden, X taps times their width.
"""

import json
import os
import zlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medusa_cli.errors import TrainingError
from medusa_cli.util.files import write_atomically
from medusa_cli.util.plain_json import parse_json

_VERSION = 1
_AGAIN = "delete the folder and run the same command again: it is written anew"
SYNC_EVERY = 50
"""Samples between two `sync`: what the system had not yet written down when the machine stopped is at most so many."""
DATA = {"hidden.f16": np.float16, "ids.i32": np.int32, "supervised.u8": np.uint8}
TAPS = "taps.f16"
# The last two places of a sample predict nothing that is in it, so their hidden states may be missing.
_MAY_LACK = 2


@dataclass(frozen=True)
class Sample:
    """One text with the target's final hidden state at each place.

    key         names the sample in messages and on resuming
    ids         n token ids
    hidden      [n, H], or up to two rows fewer: the target needn't read its own last words
    supervised  n booleans: the token is one the heads are asked for
    taps        [n, X] inner states, or up to two rows fewer; None where none are stored
    """

    key: str
    ids: Sequence[int]
    hidden: Tensor
    supervised: Sequence[bool]
    taps: Tensor | None = None


@dataclass(frozen=True)
class Inner:
    """Samples are whole texts, for heads that look at inner layers.

    taps    the layers
    width   X: numbers of a place that are stored of them; 0: none, the target is run again
    """

    taps: tuple[int, ...]
    width: int


class HiddenStore:
    """An append-only folder of samples. A kill at any moment loses only the sample that was being written.

    The numbers are written first and the sample's line in samples.jsonl last; opening cuts off whatever has no line.
    Raises TrainingError when the folder belongs to another model, lacks more than a stop can leave out, or can't be
    written.

    longest   tokens of a sample at most
    inner     samples are whole texts, with inner states; None: they are not
    """

    def __init__(
        self, folder: Path, *, hidden_size: int, fingerprint: str, longest: int, inner: Inner | None = None
    ) -> None:
        self.folder = folder
        self._longest = longest
        self.hidden_size = hidden_size
        self.tap_width = inner.width if inner else 0
        self._identity = {"version": _VERSION, "hidden_size": hidden_size, "fingerprint": fingerprint}
        if inner is not None:
            self._identity |= {"taps": list(inner.taps), "tap_width": inner.width}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._claim()
            self._index: list[dict[str, Any]] = read_index(folder, hidden_size, self.tap_width)
            self._cut()
            self._open_files()
        except OSError as error:
            raise _cannot_write(folder, error) from error

    @property
    def keys(self) -> list[str]:
        """The keys of all complete samples, in order."""
        return [line["key"] for line in self._index]

    @property
    def num_positions(self) -> int:
        """T: the tokens of all complete samples."""
        return sum(line["length"] for line in self._index)

    def append(self, sample: Sample) -> None:
        """Add one sample. Raises TrainingError on a full disk, or when a hidden state is no finite float16."""
        arrays: list[NDArray[Any]] = [
            as_float16(sample, sample.hidden, self.hidden_size),
            np.asarray(sample.ids, np.int32),
            np.asarray(sample.supervised, np.uint8),
        ]
        if self.tap_width:
            assert sample.taps is not None, sample.key
            arrays.append(as_float16(sample, sample.taps, self.tap_width))
        parts = [array.tobytes() for array in arrays]
        line = {"key": sample.key, "length": len(sample.ids), "crc32": _checksum(parts)}
        try:
            for file, part in zip(self._files[:-1], parts, strict=True):
                _write_all(file, part)
            _write_all(self._files[-1], _text_of(line).encode())
        except OSError as error:
            self.close()
            self._cut()
            self._open_files()
            raise _cannot_write(self.folder, error) from error
        self._index.append(line)

    def sync(self) -> None:
        """Force everything appended to the disk, numbers before index. Raises TrainingError."""
        try:
            for file in self._files:
                os.fsync(file)
        except OSError as error:
            raise _cannot_write(self.folder, error) from error

    def close(self) -> None:
        """Close the files; what was appended is already with the operating system."""
        for file in self._files:
            os.close(file)
        self._files.clear()

    def __enter__(self) -> "HiddenStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _sizes(self) -> dict[str, int]:
        """Bytes of a token in each data file."""
        return bytes_per_place(self.hidden_size, self.tap_width)

    def _open_files(self) -> None:
        """Unbuffered handles, the index last: a line in it vouches for numbers the system already has."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._files: list[int] = [os.open(self.folder / name, flags, 0o644) for name in (*self._sizes, "samples.jsonl")]

    def _claim(self) -> None:
        """Write store.json, or check that the folder is this model's."""
        file = self.folder / "store.json"
        if not file.exists():
            write_atomically(file, json.dumps(self._identity))
        elif (found := read_store(self.folder)) != self._identity:
            same_model = all(found.get(name) == self._identity[name] for name in ("hidden_size", "fingerprint"))
            what = "for other heads, or with another train.states" if same_model else "of another model"
            raise TrainingError(
                f"{self.folder} holds hidden states {what} ({found}, not {self._identity})",
                "choose another --output-dir, or delete the folder",
            )

    def _cut(self) -> None:
        """Drop everything past the last complete sample, unless that is more than a stop leaves."""
        total = self.num_positions
        ids = self.folder / "ids.i32"
        held = ids.stat().st_size // 4 if ids.exists() else 0
        if held - total > (SYNC_EVERY + 1) * self._longest:
            raise TrainingError(
                f"{self.folder / 'samples.jsonl'} is damaged: it names {total:,} of {held:,} tokens",
                f"put the whole file back, or {_AGAIN}",
            )
        for name, size in self._sizes.items():
            with (self.folder / name).open("ab") as stream:
                stream.truncate(total * size)
        lines = "".join(map(_text_of, self._index))
        with (self.folder / "samples.jsonl").open("ab") as stream:
            stream.truncate(len(lines.encode()))


def as_float16(sample: Sample, states: Tensor, width: int) -> NDArray[np.float16]:
    """The sample's states [n, width], missing last rows as zeros, or TrainingError naming the sample."""
    length, given = len(sample.ids), states.shape[0]
    assert len(sample.supervised) == length, sample.key
    assert states.shape[1] == width, sample.key
    assert length - _MAY_LACK <= given <= length, (sample.key, length, given)
    hidden_TH = np.zeros((length, width), np.float16)
    hidden_TH[:given] = states.detach().to("cpu", torch.float16).numpy()
    if not np.isfinite(hidden_TH).all():
        raise TrainingError(
            f"sample '{sample.key}': the model's hidden states are not finite in 16 bits",
            "run the model in another --dtype, or leave this sample out",
        )
    return hidden_TH


def bytes_per_place(hidden_size: int, tap_width: int = 0) -> dict[str, int]:
    """Bytes a token takes in each data file."""
    sizes = {name: np.dtype(kind).itemsize * (hidden_size if kind is np.float16 else 1) for name, kind in DATA.items()}
    return sizes | ({TAPS: np.dtype(np.float16).itemsize * tap_width} if tap_width else {})


def read_store(folder: Path) -> dict[str, Any]:
    """store.json, or TrainingError."""
    file = folder / "store.json"
    try:
        store = parse_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TrainingError(f"{file} is damaged: {error}", _AGAIN) from error
    if not isinstance(store, dict) or store.get("version") != _VERSION:
        raise TrainingError(f"{file} is of an unknown version", _AGAIN)
    return store


def read_index(folder: Path, hidden_size: int, tap_width: int = 0) -> list[dict[str, Any]]:
    """The lines of samples.jsonl that are complete and whose numbers are all there.

    Raises TrainingError when a line can't be read, or when more numbers are missing than a machine that stops may lose.
    """
    samples = _read_lines(folder / "samples.jsonl")
    sizes = bytes_per_place(hidden_size, tap_width)
    places = {n: (folder / n).stat().st_size // size if (folder / n).exists() else 0 for n, size in sizes.items()}
    shortest = min(places, key=lambda name: places[name])
    ends = list(accumulate(sample["length"] for sample in samples))
    whole = bisect_right(ends, places[shortest])
    if len(samples) - whole > SYNC_EVERY:
        raise TrainingError(
            f"{folder / shortest} is damaged: it holds {whole} of {len(samples)} samples",
            f"put the whole file back, or {_AGAIN}",
        )
    return samples[:whole]


def _read_lines(file: Path) -> list[dict[str, Any]]:
    """The complete lines of samples.jsonl, or TrainingError."""
    try:
        text = file.read_bytes() if file.exists() else b""
        samples = [parse_json(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]
    except ValueError as error:
        raise TrainingError(f"{file} is damaged: {error}", _AGAIN) from error
    for sample in samples:
        if not (
            isinstance(sample, dict) and isinstance(sample.get("key"), str) and isinstance(sample.get("length"), int)
        ):
            raise TrainingError(f"{file} is damaged: a line names no sample", _AGAIN)
    return samples


def check_sums(folder: Path, index: Sequence[Mapping[str, Any]], arrays: Sequence[NDArray[Any]]) -> None:
    """Raise TrainingError naming the first sample whose numbers (in the order of the files) are not those written.

    Samples of folders written before there were checksums have none.
    """
    end = 0
    for line in index:
        start, end = end, end + line["length"]
        if "crc32" in line and line["crc32"] != _checksum([array[start:end].tobytes() for array in arrays]):
            raise TrainingError(f"{folder} is damaged: sample '{line['key']}' is not as it was written", _AGAIN)


def _checksum(parts: Sequence[bytes]) -> int:
    """One checksum of all parts, in order."""
    found = 0
    for part in parts:
        found = zlib.crc32(part, found)
    return found


def _text_of(line: Mapping[str, Any]) -> str:
    """A line of samples.jsonl."""
    return json.dumps(line) + "\n"


def _write_all(file: int, data: bytes) -> None:
    """Write all bytes: the system may take fewer at once."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _cannot_write(folder: Path, error: OSError) -> TrainingError:
    """The error for a folder that takes no more bytes."""
    return TrainingError(f"can't write to {folder}: {error}", "free some space and run the same command again")
