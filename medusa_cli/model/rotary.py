"""Rotary tables that depend on a text's length: each node is turned by the table of its own row.

transformers picks the table of a whole forward by its longest position (rope types `longrope` and `dynamic`), and some
architectures read a text anew where the table changes. A text written alone is the measure: its prompt is turned by the
table of the prompt's length, and each later token by that of the text up to it. Which modules do so, and where a text
is read anew, is found by asking the model.
Shape letters: B rows, N nodes.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from medusa_cli.contracts import Draft
from medusa_cli.model.thresholds import thresholds
from medusa_cli.trees.tree import TokenTree


@dataclass(frozen=True)
class TableSpans:
    """The texts of one forward, whichever part of them it reads.

    firsts   of each row the length whose table turns its beginning, that many tokens; those behind: as they came
    ends     tokens it has at the end of this forward
    """

    firsts: Sequence[int]
    ends: Sequence[int]


@dataclass(frozen=True)
class _Lengths:
    """The text length whose table turns each node, and the lengths that can occur among them."""

    nodes_BN: Tensor
    present: Sequence[int]


class RotaryTables:
    """The rotary modules of a model whose tables depend on the text's length.

    change  the longest text that the first table is for, or None
    turns   lengths at which the model reads its text anew: keys of so many tokens are of no use for the next one
    """

    def __init__(self, model: Any, cache_name: str) -> None:
        lengths = _probed(model)
        self._rotaries = [rotary for rotary in _rotaries(model) if rotary.varies(lengths)]
        self._wanted: _Lengths | None = None
        for module in {rotary.module for rotary in self._rotaries}:
            module.register_forward_hook(self._by_row, with_kwargs=True)
        self.change = next((length for length in lengths if not self._same(length, length + 1)), None)
        self.turns = [length for length in lengths if _reads_anew(model, cache_name, length)] if self.vary else []

    @property
    def vary(self) -> bool:
        """Whether any table depends on a text's length."""
        return bool(self._rotaries)

    def first_length(self, prompt: int, length: int) -> int:
        """The length whose table turns the beginning of a text of `length` tokens, `prompt` of them given at once.

        That is the prompt's, or where the text was read anew, one more than it had read till then.
        """
        return max([prompt, *(turn + 1 for turn in self.turns if turn < length)])

    def lendable(self, prompt: int, length: int, wanted: int) -> int:
        """How many of a row's `length` committed tokens are turned as those of a prompt of `wanted` tokens."""
        if not self.vary:
            return length
        first = self.first_length(prompt, length)
        if self._same(first, wanted):
            changes = (held for held in range(first, length) if not self._same(held + 1, wanted))
            return next(changes, length)
        return 0

    def names_table(self, prompt: int) -> str:
        """What tells the table of a prompt of so many tokens from those of others; asks no module, on any thread."""
        return str(prompt) if self.change is not None and prompt > self.change else ""

    def readings(self, firsts: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
        """How often texts must be read to have their states as they were written: from where on, and by which tables.

        firsts   tokens of each text that were given at once, and with each reading the length whose table turns those
        """
        yield 0, firsts
        for turn in self.turns:  # what stands behind it was seen after another reading
            if any(first <= turn < length for first, length in zip(firsts, lengths, strict=True)):
                firsts = [
                    max(first, turn + 1) if turn < length else first
                    for first, length in zip(firsts, lengths, strict=True)
                ]
                yield turn, firsts

    def until_turn(self, draft: Draft, lengths: Sequence[int]) -> Draft:
        """The draft with nodes that stand past a row's next turn made padding: they would be read anew."""
        rooms = [next((turn - length for turn in self.turns if turn > length), None) for length in lengths]
        deepest = draft.tree.max_depth
        if all(room is None or room > deepest for room in rooms):
            return draft
        tree, num_rows = draft.tree, len(rooms)
        room_B1 = torch.tensor([deepest + 1 if room is None else room for room in rooms])[:, None]
        real_BN = tree.real_XN & (tree.depths_XN < room_B1.to(tree.depths_XN.device))
        parents_BN, ranks_BN = (each.expand(num_rows, -1) for each in (tree.parents_XN, tree.ranks_XN))
        return replace(draft, tree=TokenTree(parents_BN, ranks_BN, real_BN))

    @contextmanager
    def of(self, spans: TableSpans | None, held: Sequence[int], positions_BN: Tensor) -> Iterator[None]:
        """Within, nodes at these positions are turned by the tables of their texts.

        held   committed tokens of each row
        """
        if self.vary and spans is not None:
            self._wanted = _lengths(spans, held, positions_BN)
        try:
            yield
        finally:
            self._wanted = None

    def _same(self, one: int, other: int) -> bool:
        return all(rotary.table(one) == rotary.table(other) for rotary in self._rotaries)

    def _by_row(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], stock: Any) -> Any:
        """What the rotary module gives for each node, by its own length.

        A forward of the library's own is made anew too: what it gives would depend on the texts before it.
        """
        given = inspect.signature(module.forward).bind(*args, **named).arguments
        rotary = next((each for each in self._rotaries if each.is_of(module, given.get("layer_type"))), None)
        if rotary is None:
            return stock
        if self._wanted is None:
            return rotary.fresh(given["x"], given["position_ids"])
        return rotary.by_row(given["x"], given["position_ids"], self._wanted)


def _lengths(spans: TableSpans, held: Sequence[int], positions_BN: Tensor) -> _Lengths:
    """Which table turns each node; what stands past a row's end is padding, and adds none."""
    firsts, lasts = list(spans.firsts), [max(pair) for pair in zip(spans.firsts, spans.ends, strict=True)]
    least_B1, most_B1 = (torch.tensor(each, device=positions_BN.device)[:, None] for each in (firsts, lasts))
    present = {
        length
        for first, last, before in zip(firsts, lasts, held, strict=True)
        for length in range(max(first, before + 1), last + 1)
    }
    return _Lengths((positions_BN + 1).maximum(least_B1).minimum(most_B1), sorted(present))


class _Rotary:
    """One rotary module, for one kind of layer where it has a table for each."""

    def __init__(self, module: Any, layer_type: str | None) -> None:
        self.module = module
        self._named = {} if layer_type is None else {"layer_type": layer_type}
        self._tables: dict[int, bytes] = {}

    def is_of(self, module: nn.Module, layer_type: str | None) -> bool:
        """Whether this is what the module does for this kind of layer."""
        return module is self.module and self._named.get("layer_type") == layer_type

    def varies(self, lengths: Sequence[int]) -> bool:
        """Whether the table differs at any of these lengths, or one beyond."""
        return len({self.table(length + more) for length in lengths for more in (0, 1)}) > 1

    def table(self, length: int) -> bytes:
        """What tells the table of a text of this length from others: how it turns the token at position 1."""
        if length not in self._tables:
            x = torch.zeros(1, 1, 1, device=self._device)
            turned = self._at_length(x, torch.ones(1, 1, dtype=torch.long, device=self._device), length)
            self._tables[length] = b"".join(
                torch.view_as_real(part).cpu().numpy().tobytes() if part.is_complex() else part.cpu().numpy().tobytes()
                for part in _parts(turned)
            )
        return self._tables[length]

    def fresh(self, x: Tensor, positions_BN: Tensor) -> Any:
        """What the module gives when it has seen no text before."""
        # `dynamic` keeps the table of the longest text it has seen until it meets a short one
        self.module.forward(x, torch.zeros_like(positions_BN[:1, :1]), **self._named)
        return self.module.forward(x, positions_BN, **self._named)

    def by_row(self, x: Tensor, positions_BN: Tensor, wanted: _Lengths) -> Any:
        """What it gives for each node by the table of its length."""
        groups: dict[bytes, list[int]] = {}
        for length in wanted.present:
            groups.setdefault(self.table(length), []).append(length)
        lengths_BN = wanted.nodes_BN.to(positions_BN.device)
        positions_BN = positions_BN.expand(len(lengths_BN), -1)
        group_L = torch.zeros(max(wanted.present) + 1, dtype=torch.long)
        for number, lengths in enumerate(groups.values()):
            group_L[lengths] = number
        which_BN1 = group_L.to(positions_BN.device)[lengths_BN][..., None]
        turned: list[Tensor] = []
        for number, lengths in enumerate(groups.values()):
            parts = _parts(self._at_length(x, positions_BN, max(lengths)))
            turned = (
                parts
                if number == 0
                else [torch.where(which_BN1 == number, new, old) for new, old in zip(parts, turned, strict=True)]
            )
        return turned[0] if len(turned) == 1 else tuple(turned)

    def _at_length(self, x: Tensor, positions_BN: Tensor, length: int) -> Any:
        """These positions turned as in a text of `length` tokens; what stands past its end is not meant."""
        last_B1 = torch.full_like(positions_BN[:, :1], max(length, 2) - 1)
        given = torch.cat([positions_BN.minimum(last_B1), last_B1], dim=1)
        turned = [part[:, :-1] for part in _parts(self.fresh(x, given))]
        return turned[0] if len(turned) == 1 else tuple(turned)

    @property
    def _device(self) -> torch.device:
        return next((buffer.device for buffer in self.module.buffers()), torch.device("cpu"))


def _parts(turned: Any) -> list[Tensor]:
    """Cosines and sines, or one tensor of complex numbers."""
    return [turned] if isinstance(turned, Tensor) else list(turned)


def _rotaries(model: Any) -> Iterator[_Rotary]:
    """The modules that the library may rework for long texts; plain ones are left out."""
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        if types is None or "position_ids" not in inspect.signature(module.forward).parameters:
            continue
        named = types if isinstance(types, dict) else {None: types}
        yield from (_Rotary(module, kind) for kind, type_ in named.items() if type_ != "default")


def _probed(model: Any) -> list[int]:
    """Lengths at which tables may change."""
    numbers = thresholds(model.config.get_text_config()).values()
    return sorted({length for number in numbers for length in (number - 1, number, number + 1) if length > 1})


class _OfLength(DynamicCache):
    """A cache that says it holds so many tokens."""

    def __init__(self, config: Any, length: int) -> None:
        super().__init__(config=config)
        self._length = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """What is said."""
        return self._length


def _reads_anew(model: Any, cache_name: str, length: int) -> bool:
    """Whether the library, with so many tokens in its cache, forgets them for the next one."""
    ids = torch.zeros(1, length + 1, dtype=torch.long)
    cache = _OfLength(model.config.get_text_config(), length)
    inputs = model.prepare_inputs_for_generation(
        ids, next_sequence_length=1, attention_mask=torch.ones_like(ids), use_cache=True, **{cache_name: cache}
    )
    return inputs.get(cache_name) is None
