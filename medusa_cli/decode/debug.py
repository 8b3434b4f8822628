"""Watching the loop, for who looks for a fault. Slow, and off unless the environment asks.

MEDUSA_CHECK=1            after each step the cache is compared with a fresh reading of each row's text
MEDUSA_TRACE=FILE         each step is written to FILE, a line of JSON for each row
MEDUSA_REPLAY=FILE        each step is compared with those in FILE; stops at the first that differs

Shape letters: H key/value heads, C cache columns, E head width.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch
from torch import Tensor

from medusa_cli.contracts import Step
from medusa_cli.decode.rows import Row, Rows
from medusa_cli.errors import DataError, ExactnessError
from medusa_cli.model.target import Target
from medusa_cli.util.plain_json import parse_json

# Of the largest number a layer holds: one forward over a text and several round differently.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


class Watch(Protocol):
    """Looks at each step before finished rows leave."""

    def after(self, rows: Rows, step: Step) -> None:
        """Raises ExactnessError when something is not as it must be."""


@contextmanager
def watching(target: Target) -> Iterator[Sequence[Watch]]:
    """The watches that the environment asks for."""
    with ExitStack() as stack:
        watches: list[Watch] = []
        if os.environ.get("MEDUSA_CHECK", "0") not in ("", "0"):
            watches.append(CacheCheck(target))
        if recorded := os.environ.get("MEDUSA_REPLAY"):
            watches.append(Replay(Path(recorded)))
        if wanted := os.environ.get("MEDUSA_TRACE"):
            watches.append(Trace(stack.enter_context(_opened(Path(wanted)))))
        yield watches


@contextmanager
def _opened(file: Path) -> Iterator[TextIO]:
    try:
        stream = file.open("a", encoding="utf-8")
    except OSError as error:
        raise DataError(f"can't write the trace {file}: {error.strerror}", "name another file: MEDUSA_TRACE") from error
    with stream:
        yield stream


class CacheCheck:
    """Keys and values of every row equal those of a fresh reading of its text."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._num_steps = 0

    def after(self, rows: Rows, step: Step) -> None:
        """Reads every row's text again."""
        self._num_steps += 1
        for index, row in enumerate(rows.active):
            length = rows.cache.lengths[index]
            fresh = self._target.new_cache(1, length)
            first = self._target.tables.first_length(row.prompt_tokens, length)
            self._target.prefill([row.tokens[:length]], fresh, as_long_as=[first])
            for number, (held, read) in enumerate(zip(rows.cache.layers, fresh.layers, strict=True)):
                for name in ("keys", "values"):
                    ours_HCE = getattr(held, name)[index, :, :length]
                    self._compare(ours_HCE, getattr(read, name)[0, :, :length], f"{name} of layer {number}", row)

    def _compare(self, ours_HCE: Tensor, fresh_HCE: Tensor, what: str, row: Row) -> None:
        apart_C = (ours_HCE.float() - fresh_HCE.float()).abs().amax((0, 2))
        allowed = _TOLERANCE[ours_HCE.dtype] * max(1.0, float(fresh_HCE.abs().max()))
        if (apart_C > allowed).any():
            column = int((apart_C > allowed).int().argmax())
            raise ExactnessError(
                f"step {self._num_steps}, text {row.key}: the {what} at position {column} are "
                f"{apart_C.max():.2g} apart from a fresh reading",
                "this is a fault: please report it with the command and the output of medusa doctor --json",
            )


def _lines(rows: Rows, step: Step) -> Iterator[dict[str, Any]]:
    """What a step did to each row."""
    for row, tokens, length in zip(rows.active, step.tokens, rows.cache.lengths, strict=False):
        place = len(row.new_tokens) - len(tokens)
        yield {"text": row.key, "place": place, "tokens": list(tokens), "nodes": step.num_nodes, "cached": length}


class Trace:
    """Writes each step."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def after(self, rows: Rows, step: Step) -> None:
        """One line for each row."""
        for line in _lines(rows, step):
            self._stream.write(json.dumps(line) + "\n")
        self._stream.flush()


class Replay:
    """Compares the tokens of each text with those recorded, whatever the steps they came in."""

    def __init__(self, file: Path) -> None:
        try:
            lines = [parse_json(line) for line in file.read_text(encoding="utf-8").splitlines()]
            self._recorded = {
                (line["text"], line["place"] + n): t for line in lines for n, t in enumerate(line["tokens"])
            }
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{file} is no trace: {error}", "record one with MEDUSA_TRACE=FILE") from error

    def after(self, rows: Rows, step: Step) -> None:
        """Raises ExactnessError at the first token that is another."""
        for line in _lines(rows, step):
            for offset, token in enumerate(line["tokens"]):
                place = line["place"] + offset
                recorded = self._recorded.get((line["text"], place), token)
                if recorded != token:
                    raise ExactnessError(
                        f"text {line['text']} parts from the trace at token {place}: {token}, recorded {recorded}",
                        f"it came in a step of {line['nodes']} nodes, with {line['cached']} tokens cached after it",
                    )
