"""The folder of hidden states: appended to while the target writes or reads, and never left half-written.

It holds store.json (whose states they are), samples.jsonl (one line a sample) and, for all samples end to end,
hidden.f16 [T, H], ids.i32 [T] and supervised.u8 [T]. This file knows no model and no heads.

Shape letters: T places of all samples end to end, H hidden.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medusa_cli.atomic import write_atomically
from medusa_cli.errors import TrainingError

_VERSION = 1
_AGAIN = "delete the folder and run the data stage again"
DATA = {"hidden.f16": np.float16, "ids.i32": np.int32, "supervised.u8": np.uint8}
# The last two places of a sample predict nothing that is in it, so their hidden states may be missing.
_MAY_LACK = 2


@dataclass(frozen=True)
class Sample:
    """One text with the target's final hidden state at each place.

    key         names the sample in messages and on resuming
    ids         n token ids
    hidden      [n, H], or up to two rows fewer: the target needn't read its own last words
    supervised  n booleans: the token is one the heads are asked for
    """

    key: str
    ids: Sequence[int]
    hidden: Tensor
    supervised: Sequence[bool]


class HiddenStore:
    """An append-only folder of samples. A kill at any moment loses only the sample that was being written.

    The numbers are written first and the sample's line in samples.jsonl last; opening cuts off whatever has no line.
    Raises TrainingError when the folder belongs to another model, or can't be written.
    """

    def __init__(self, folder: Path, *, hidden_size: int, fingerprint: str) -> None:
        self.folder = folder
        self.hidden_size = hidden_size
        self._identity = {"version": _VERSION, "hidden_size": hidden_size, "fingerprint": fingerprint}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._claim()
            self._index: list[tuple[str, int]] = [
                (line["key"], line["length"]) for line in read_index(folder, hidden_size)
            ]
            self._cut()
        except OSError as error:
            raise _cannot_write(folder, error) from error
        self._open_files()

    @property
    def keys(self) -> list[str]:
        """The keys of all complete samples, in order."""
        return [key for key, _ in self._index]

    @property
    def num_positions(self) -> int:
        """T: the tokens of all complete samples."""
        return sum(length for _, length in self._index)

    def append(self, sample: Sample) -> None:
        """Add one sample. Raises TrainingError on a full disk, or when a hidden state is no finite float16."""
        hidden_TH = as_float16(sample, self.hidden_size)
        arrays: tuple[NDArray[Any], ...] = (
            hidden_TH,
            np.asarray(sample.ids, np.int32),
            np.asarray(sample.supervised, np.uint8),
        )
        line = json.dumps({"key": sample.key, "length": len(sample.ids)}) + "\n"
        try:
            for file, array in zip(self._files[:-1], arrays, strict=True):
                _write_all(file, array.tobytes())
            _write_all(self._files[-1], line.encode())
        except OSError as error:
            self.close()
            self._cut()
            self._open_files()
            raise _cannot_write(self.folder, error) from error
        self._index.append((sample.key, len(sample.ids)))

    def sync(self) -> None:
        """Force everything appended to the disk, numbers before index."""
        for file in self._files:
            os.fsync(file)

    def close(self) -> None:
        """Close the files; what was appended is already with the operating system."""
        for file in self._files:
            os.close(file)
        self._files.clear()

    def __enter__(self) -> "HiddenStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_files(self) -> None:
        """Unbuffered handles, the index last: a line in it vouches for numbers the system already has."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._files: list[int] = [os.open(self.folder / name, flags, 0o644) for name in (*DATA, "samples.jsonl")]

    def _claim(self) -> None:
        """Write store.json, or check that the folder is this model's."""
        file = self.folder / "store.json"
        if not file.exists():
            write_atomically(file, json.dumps(self._identity))
        elif (found := read_store(self.folder)) != self._identity:
            raise TrainingError(
                f"{self.folder} holds hidden states of another model ({found}, not {self._identity})",
                "choose another --output-dir, or delete the folder",
            )

    def _cut(self) -> None:
        """Drop everything past the last complete sample."""
        total = self.num_positions
        for name, size in bytes_per_place(self.hidden_size).items():
            with (self.folder / name).open("ab") as stream:
                stream.truncate(total * size)
        lines = "".join(json.dumps({"key": key, "length": length}) + "\n" for key, length in self._index)
        with (self.folder / "samples.jsonl").open("ab") as stream:
            stream.truncate(len(lines.encode()))


def as_float16(sample: Sample, hidden_size: int) -> NDArray[np.float16]:
    """The sample's hidden states [n, H], missing last rows as zeros, or TrainingError naming the sample."""
    length, given = len(sample.ids), sample.hidden.shape[0]
    assert len(sample.supervised) == length, sample.key
    assert sample.hidden.shape[1] == hidden_size, sample.key
    assert length - _MAY_LACK <= given <= length, (sample.key, length, given)
    hidden_TH = np.zeros((length, hidden_size), np.float16)
    hidden_TH[:given] = sample.hidden.detach().to("cpu", torch.float16).numpy()
    if not np.isfinite(hidden_TH).all():
        raise TrainingError(
            f"sample '{sample.key}': the model's hidden states are not finite in 16 bits",
            "run the model in another --dtype, or leave this sample out",
        )
    return hidden_TH


def bytes_per_place(hidden_size: int) -> dict[str, int]:
    """Bytes a token takes in each data file."""
    return {name: np.dtype(kind).itemsize * (hidden_size if kind is np.float16 else 1) for name, kind in DATA.items()}


def read_store(folder: Path) -> dict[str, Any]:
    """store.json, or TrainingError."""
    file = folder / "store.json"
    try:
        store = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TrainingError(f"{file} is damaged: {error}", _AGAIN) from error
    if not isinstance(store, dict) or store.get("version") != _VERSION:
        raise TrainingError(f"{file} is of an unknown version", _AGAIN)
    return store


def read_index(folder: Path, hidden_size: int) -> list[dict[str, Any]]:
    """The lines of samples.jsonl that are complete and whose numbers are all there."""
    file = folder / "samples.jsonl"
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    sizes = bytes_per_place(hidden_size)
    there = min((os.path.getsize(folder / n) // size if (folder / n).exists() else 0) for n, size in sizes.items())
    complete, total = [], 0
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        try:
            sample = json.loads(line)
        except ValueError as error:
            raise TrainingError(f"{file} is damaged: {error}", _AGAIN) from error
        if total + sample["length"] > there:
            break
        total += sample["length"]
        complete.append(sample)
    return complete


def _write_all(file: int, data: bytes) -> None:
    """Write all bytes: the system may take fewer at once."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _cannot_write(folder: Path, error: OSError) -> TrainingError:
    """The error for a folder that takes no more bytes."""
    return TrainingError(f"can't write to {folder}: {error}", "free some space and run the same command again")
