"""A file or a hub data set as numbered rows. This file knows no conversation and no tokenizer.

Rows are read one by one: a file larger than memory is fine, except `.json`, which is one document.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_cli.errors import DataError
from medusa_cli.util.hub import settle_reach
from medusa_cli.util.optional import need
from medusa_cli.util.paths import expanded
from medusa_cli.util.plain_json import parse_json

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_UTF8_HINT = "save it as UTF-8 text"


@dataclass(frozen=True)
class Broken:
    """In place of a row's value: a line that holds no JSON. The error names it."""

    error: DataError


@dataclass(frozen=True)
class Row:
    """One row as stored. `number` counts from 1; in `.jsonl` and `.txt` it is the line number."""

    number: int
    value: Any


def read_rows(source: str, split: str, *, config: str | None = None, streaming: bool = False) -> Iterator[Row]:
    """The rows of a file (.jsonl, .json, .parquet, .txt), or of a hub data set's `split`.

    config      of a hub data set that has several
    streaming   fetch a hub data set as its rows are asked for, instead of downloading it whole first

    A line of a `.txt` file is the row {"text": line}; blank lines are no rows. Raises DataError when the source is
    missing, unreadable or not text. A line of `.jsonl` that is no JSON is a row too, whose value is Broken.
    """
    path = expanded(source)
    suffix = path.suffix.lower()
    if path.is_dir():
        raise DataError(f"{source} is a folder", f"name one file in it ({', '.join(_READERS)})")
    if path.exists():
        if suffix not in _READERS:
            raise DataError(f"{source}: can't tell its format from '{suffix}'", f"use one of {', '.join(_READERS)}")
        return _READERS[suffix](path)
    if not is_on_the_hub(source):
        raise DataError(f"no such file: {source}", f"looked in {path.parent.absolute()}; check the path")
    return _hub_rows(source, {"name": config, "split": split, "streaming": streaming})


def is_on_the_hub(source: str) -> bool:
    """Whether this names a data set of the hub, and no file of this machine that is there or should be."""
    path = expanded(source)
    return not path.exists() and path.suffix.lower() not in _READERS and bool(_HUB_ID.fullmatch(source))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers from 1 and non-blank lines of a UTF-8 text file."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip("\r\n")
                if "\0" in text:
                    raise DataError(f"{path}, line {number}: holds a zero byte, so this is no text file", _UTF8_HINT)
                if text.strip():
                    yield number, text
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line {number}: is not UTF-8 ({error.reason})", _UTF8_HINT) from error
    except OSError as error:
        raise DataError(f"can't read {path}: {error.strerror}", "name a readable file") from error


def _parse(text: str, path: Path, number: int) -> Any:
    """The JSON value on one line, or Broken."""
    try:
        return parse_json(text)
    except ValueError as error:
        return Broken(DataError(f"{path}, line {number}: broken JSON ({error})", "each line must be one JSON object"))


def _jsonl_rows(path: Path) -> Iterator[Row]:
    """One JSON value a line."""
    for number, text in _lines(path):
        yield Row(number, _parse(text, path, number))


def _txt_rows(path: Path) -> Iterator[Row]:
    """One plain text a line."""
    for number, text in _lines(path):
        yield Row(number, {"text": text.strip()})


def _json_rows(path: Path) -> Iterator[Row]:
    """The items of one JSON list; a `.json` file whose first line is a whole object holds JSON lines."""
    lines = list(_lines(path))
    text = "\n".join(line for _, line in lines)
    if not text:
        return
    try:
        value, end = json.JSONDecoder().raw_decode(text.lstrip())
    except (ValueError, RecursionError) as error:
        line = lines[min(getattr(error, "lineno", 1), len(lines)) - 1][0]
        raise DataError(
            f"{path}, line {line}: broken JSON ({error})", "the file must be a JSON list of rows"
        ) from error
    if text.lstrip()[end:].strip():
        yield from _jsonl_rows(path)
        return
    rows = value if isinstance(value, list) else [value]
    yield from (Row(number, row) for number, row in enumerate(rows, start=1))


def _parquet_rows(path: Path) -> Iterator[Row]:
    """The rows of a parquet file, a batch in memory at a time."""
    arrow = need("pyarrow", "train")
    parquet = need("pyarrow.parquet", "train")
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=1024):
            for value in batch.to_pylist():
                number += 1
                yield Row(number, value)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"can't read {path} as parquet: {error}", "check that the file is whole") from error


def _hub_rows(name: str, options: Mapping[str, Any]) -> Iterator[Row]:
    """The rows of one split of a data set on the hub; `options` are load_dataset's."""
    settle_reach()
    datasets = need("datasets", "train")
    # offline, no such data set, no such split or configuration, a data set that is a script, a damaged download
    known = (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError)
    try:
        rows = datasets.load_dataset(name, **options)
    except known as error:
        raise DataError(
            f"can't load data set '{name}', split '{options['split']}': {_reason(error)}",
            f"no file has that name either; check the id, --dataset-split and data.dataset_config, or give a local "
            f"file ({', '.join(_READERS)})",
        ) from error
    return _numbered(rows, name, known)


def _numbered(rows: Iterable[Any], name: str, known: tuple[type[Exception], ...]) -> Iterator[Row]:
    """The rows one by one; a stream may break in the middle."""
    number = 0
    try:
        for value in rows:
            number += 1
            yield Row(number, value)
    except known as error:
        raise DataError(
            f"data set '{name}' breaks off after row {number}: {_reason(error)}",
            "run the same command again, or read it without --streaming",
        ) from error


def _reason(error: Exception) -> str:
    """The first line of a library's error."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


_READERS = {".jsonl": _jsonl_rows, ".json": _json_rows, ".parquet": _parquet_rows, ".txt": _txt_rows}
