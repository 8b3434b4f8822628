"""What two run folders differ in, apart from clocks and from who was asked how."""

import difflib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

CLOCKS = {"examples_per_second", "texts_per_second", "seconds_left", "decode_seconds"}
STATES = 2e-3  # how far float16 states may lie apart where rows are rounded beside others


def differences(wanted: Path, found: Path, *, exact: bool) -> list[str]:
    """A sentence for each difference of a finished run from the one it should equal.

    exact   hidden states are equal to the last bit, and so is all that is learnt from them; else only what was written
            is compared, and the states nearly
    """
    names = [_names(folder) for folder in (wanted, found)]
    wrong = [f"files differ: {sorted(names[0] ^ names[1])}"] if names[0] != names[1] else []
    checks = {**_WRITTEN, **(_LEARNT if exact else {})}
    for name, read in checks.items():
        if not (wanted / name).exists() and not (found / name).exists():
            continue
        try:
            same = read(wanted / name) == read(found / name)
        except (OSError, ValueError, KeyError) as error:
            wrong.append(f"{name} can't be read: {type(error).__name__} {error}")
            continue
        if not same:
            wrong.append(f"{name} differs" + (_lines(wanted, found) if name == "train.jsonl" else ""))
    for store in ("answers", "read", "held-out"):
        if (wanted / "written" / store).exists():
            wrong += _states(wanted / "written" / store, found / "written" / store, exact)
    return wrong


def _lines(wanted: Path, found: Path) -> str:
    """Which lines of the log are not the same."""
    ours, theirs = ([json.dumps(line) for line in _log(folder / "train.jsonl")] for folder in (found, wanted))
    changes = difflib.unified_diff(theirs, ours, "wanted", "found", lineterm="", n=0)
    return ":\n" + "\n".join(changes)


def _names(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def _states(wanted: Path, found: Path, exact: bool) -> list[str]:
    """Whether two stores hold the same samples, in whatever order."""
    ours, theirs = (read_store_of(folder) for folder in (found, wanted))
    if ours.keys() != theirs.keys():
        return [f"{wanted.name} hold other samples: {sorted(ours.keys() ^ theirs.keys())}"]
    wrong = []
    for key, sample in theirs.items():
        if not all(np.array_equal(ours[key][part], sample[part]) for part in ("ids", "supervised")):
            wrong.append(f"{wanted.name}: sample {key} holds other tokens")
        elif exact and not np.array_equal(ours[key]["hidden"], sample["hidden"]):
            wrong.append(f"{wanted.name}: sample {key} has other states")
        elif not np.allclose(ours[key]["hidden"], sample["hidden"], atol=STATES, rtol=STATES):
            wrong.append(f"{wanted.name}: sample {key} has far other states")
    return wrong


def read_store_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Samples by key, read from the layout alone."""
    hidden_size = json.loads((folder / "store.json").read_text())["hidden_size"]
    hidden = np.fromfile(folder / "hidden.f16", np.float16).reshape(-1, hidden_size)
    ids, supervised = np.fromfile(folder / "ids.i32", np.int32), np.fromfile(folder / "supervised.u8", np.uint8)
    samples: dict[str, dict[str, Any]] = {}
    start = 0
    for line in map(json.loads, (folder / "samples.jsonl").open()):
        place = slice(start, start + line["length"])
        assert line["key"] not in samples, line
        samples[line["key"]] = {"hidden": hidden[place], "ids": ids[place], "supervised": supervised[place]}
        start = place.stop
    assert start == len(ids) == len(hidden) == len(supervised), "something lies past the last sample"
    return samples


def _bytes(file: Path) -> object:
    return file.read_bytes()


def _prompts(file: Path) -> object:
    rows = [json.loads(line) for line in file.open()]
    return sorted((row["id"], row["prompt"], row["tokens"]) for row in rows)


def _without(*names: str) -> Callable[[Path], object]:
    return lambda file: {name: value for name, value in json.loads(file.read_text()).items() if name not in names}


def log_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of train.jsonl, without what a clock says."""
    lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in CLOCKS} for line in lines]


def _log(file: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name != "speedup"} for line in log_of(file.parent)]


def _card(file: Path) -> object:
    text = re.sub(r"## Command\n\n```\n.*?\n```", "", file.read_text(), flags=re.S)
    # how much faster a decode was: the last figure of the table's rows, and of the sentence below it
    return re.sub(r"\d+\.\d+( \|$|x plain decoding)", "", text, flags=re.M)


_WRITTEN: dict[str, Callable[[Path], object]] = {"run.json": _bytes, "written/prompts.jsonl": _prompts}
_LEARNT: dict[str, Callable[[Path], object]] = {
    "heads.safetensors": _bytes,
    "heads.json": _bytes,
    "accuracy.json": _without("step_cost"),
    "tree.json": _without("step_cost"),
    "train.jsonl": _log,
    "provenance.json": _without("command"),
    "README.md": _card,
}
