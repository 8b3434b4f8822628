"""Chunked prefill: prompts are cut into pieces, so that a forward's memory is bounded whatever there is to read.

It calls no model: whoever takes the pieces runs one forward for each, and may do other things in between. Where a
prompt is cut depends on lengths and on the model alone, never on what is free: the last bits of states depend on it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from medusa_cli.model.forward_memory import ForwardMemory

PREFILL_CHUNK = 2048  # tokens of one forward at most: matrices of that many rows keep any device busy
LEAST = 64  # tokens of a piece that is cut: below that, reading weights would cost more than using them

OnRead = Callable[[int, int], None]
"""(tokens read of the prompts that are read together, of how many)"""


class Progress:
    """Tells how far reading is, of the prompts that are read in turn."""

    def __init__(self, on_read: OnRead | None, total: int) -> None:
        self._on_read, self._total, self._read = on_read, total, 0

    def add(self, tokens: int) -> None:
        """So many more tokens are read."""
        self._read += tokens
        if self._on_read is not None:
            self._on_read(self._read, self._total)


@dataclass(frozen=True)
class Piece:
    """What one forward reads: of neighbouring rows from `row` on, the ids behind what they hold.

    ids         of each row
    as_long_as  the text length whose rotary table turns each row's ids
    """

    row: int
    ids: Sequence[Sequence[int]]
    as_long_as: Sequence[int]
    is_last: bool

    @property
    def lengths(self) -> list[int]:
        """Tokens read of each row."""
        return [len(row) for row in self.ids]

    @property
    def num_tokens(self) -> int:
        """Of all rows."""
        return sum(self.lengths)

    @property
    def tokens_BN(self) -> Tensor:
        """The ids, padded on the right."""
        tokens_BN = torch.zeros(len(self.ids), max(self.lengths), dtype=torch.long)
        for row, ids in enumerate(self.ids):
            tokens_BN[row, : len(ids)] = torch.tensor(ids)
        return tokens_BN


def pieces(
    prompts: Sequence[Sequence[int]],
    held: Sequence[int],
    memory: ForwardMemory,
    as_long_as: Sequence[int] | None = None,
) -> Iterator[Piece]:
    """Cut what is unread of prompts, of which the first `held` tokens each are in the cache, in the order of rows.

    Short prompts are read side by side, a long one alone and, where it is too long for one forward, bit by bit.

    as_long_as   the text length whose rotary table turns each prompt; None: its own
    """
    row, turned = 0, as_long_as or [len(prompt) for prompt in prompts]
    while row < len(prompts):
        count = 1
        while row + count < len(prompts) and _fit(memory, _widest(prompts, held, range(row, row + count + 1))):
            count += 1
        if count > 1:
            rows = range(row, row + count)
            rest = [prompts[each][held[each] :] for each in rows]
            yield Piece(row, rest, turned[row : row + count], is_last=True)
        else:
            yield from _cut(Piece(row, [prompts[row]], [turned[row]], is_last=True), held[row], memory)
        row += count


def peak_bytes(memory: ForwardMemory, rows: int, longest: int) -> int:
    """What the largest piece takes of so many prompts of this length."""
    most = min(rows, PREFILL_CHUNK // max(1, longest))  # more rows are never read together
    together = next((count for count in range(most, 1, -1) if _fit(memory, Shape(count, longest, longest))), 1)
    tokens = longest if together > 1 else _tokens_alone(memory, longest, longest)
    return memory.bytes(together, tokens, longest)


@dataclass(frozen=True)
class Shape:
    """Of a forward's input: rows, tokens of each, and columns that attention reads."""

    rows: int
    tokens: int
    columns: int


def _widest(prompts: Sequence[Sequence[int]], held: Sequence[int], rows: range) -> Shape:
    """The input of these rows read together, padded."""
    unread = max(len(prompts[row]) - held[row] for row in rows)
    return Shape(len(rows), unread, max(held[row] for row in rows) + unread)


def _fit(memory: ForwardMemory, shape: Shape) -> bool:
    """Whether one forward reads this much."""
    few = shape.rows * shape.tokens <= PREFILL_CHUNK
    return few and memory.bytes(shape.rows, shape.tokens, shape.columns) <= memory.budget


def _tokens_alone(memory: ForwardMemory, unread: int, columns: int) -> int:
    """Tokens that are read at once of a row that is read alone."""
    tokens = min(unread, PREFILL_CHUNK)
    while tokens > LEAST and not _fit(memory, Shape(1, tokens, columns)):
        tokens = max(LEAST, tokens // 2)
    return tokens


def _cut(whole: Piece, held: int, memory: ForwardMemory) -> Iterator[Piece]:
    """One prompt, in as many pieces as it takes."""
    (prompt,) = whole.ids
    tokens = _tokens_alone(memory, len(prompt) - held, len(prompt))
    for start in range(held, len(prompt), tokens):
        end = min(start + tokens, len(prompt))
        yield replace(whole, ids=[prompt[start:end]], is_last=end == len(prompt))
