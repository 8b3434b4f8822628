"""Inner states of the target: noted while it writes, read with texts that are there, read again for each step.

Shape letters: B rows, S texts, T positions, D places on a path, L tapped layers, H hidden, X taps times their width.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_cli.contracts import Context, Drafter
from medusa_cli.drafters.none import NoDrafter
from medusa_cli.model.costs.by_nodes import random_ids
from medusa_cli.model.target import Target
from medusa_cli.train.text_examples import Reader, evened


class StateRecorder(NoDrafter):
    """Guesses nothing, and notes inner states of every text, in 16 bits, until they are asked for."""

    def __init__(self, taps: tuple[int, ...]) -> None:
        super().__init__()
        self.taps = taps
        self._read: dict[int, tuple[list[int], list[Tensor]]] = {}  # what each row has read, and its states
        self._ended: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)  # by what was read: texts may be equal

    def join(self, first_row: int, prompts: Sequence[Sequence[int]], taps_BTLH: Tensor | None) -> None:
        """The prompts' states."""
        assert taps_BTLH is not None
        states_BTX = _noted(taps_BTLH)
        for row, prompt in enumerate(prompts):
            self._read[first_row + row] = list(prompt), [states_BTX[row, : len(prompt)].clone()]

    def keep(self, context: Context, taps_BDLH: Tensor | None) -> None:
        """Those of what was written since."""
        assert taps_BDLH is not None
        states_BDX = _noted(taps_BDLH)
        for row, tokens in enumerate(context.tokens):
            read, states = self._read[row]
            new = tokens[len(read) : -1]
            read += new
            states.append(states_BDX[row, : len(new)])

    def move(self, source: int, row: int) -> None:
        """They go with the row; the text that stood there has ended."""
        self._end(row)
        self._read[row] = self._read.pop(source)

    def drop(self, row: int) -> None:
        """The text has ended, if it wasn't moved."""
        if row in self._read:
            self._end(row)

    def _end(self, row: int) -> None:
        read, states = self._read.pop(row)
        self._ended[tuple(read)].append(torch.cat(states))

    def take(self, tokens: Sequence[int]) -> Tensor:
        """States [T - 1, X] of a text that has ended, whose last token was never read. Each is given once."""
        read = tuple(tokens[:-1])
        states = self._ended[read].pop()
        if not self._ended[read]:
            del self._ended[read]
        return states


def _noted(taps_BTLH: Tensor) -> Tensor:
    """As they are stored [B, T, X]."""
    return evened(taps_BTLH).to("cpu", torch.float16)


def reader_of(target: Target, taps: tuple[int, ...]) -> Reader:
    """Reads texts again for their inner states."""

    def read(texts: Sequence[Sequence[int]]) -> Tensor:
        found = target.states(texts, taps=taps).taps_BNLH
        assert found is not None
        return evened(found)

    return read


def read_before(target: Target, drafter: Drafter, tokens: int) -> None:
    """Show a drafter with a memory a text of so many random tokens as its one row, so that it can be timed."""
    if drafter.taps:
        tokens = min(tokens, target.context_limit or tokens)
        cache, ids = target.new_cache(1, tokens), random_ids(target, tokens)[0].tolist()
        target.prefill([ids], cache, taps=drafter.taps)
        drafter.join(0, [ids], cache.read_taps(slice(0, 1)))
