"""TreeCache: keys and values of many rows, each with its own length, kept by path.

It knows no drafter and no rule; it is told where the next forward writes and which path survives.
Shape letters: B rows, N tree nodes, D places on a path, C cache columns, H key/value heads, E head width,
L tapped layers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from medusa_cli.contracts import Verdict
from medusa_cli.kernels.attend import Nodes, attend
from medusa_cli.trees.tree import TokenTree

BLOCK = 128  # columns a layer grows by: few reallocations, little waste


Allocate = Callable[[str, tuple[int, int, int, int], Tensor], Tensor]
"""(keys or values, shape [rows, H, C, E], like) -> room for them, of C columns at least"""


def new_memory(kind: str, shape: tuple[int, int, int, int], like: Tensor) -> Tensor:
    """New memory, as many columns as asked for."""
    return torch.zeros(shape, dtype=like.dtype, device=like.device)


def numbers_on(device: torch.device, numbers: Sequence[int]) -> Tensor:
    """Numbers of the host on a device, without waiting until it has them."""
    held = torch.tensor(numbers, pin_memory=device.type == "cuda")
    return held.to(device, non_blocking=True)


@dataclass(frozen=True)
class Place:
    """Where one forward writes: a range of rows, and for each of them N columns from its length on."""

    rows: slice
    columns_BN: Tensor
    start: int | None  # the first column when all rows have the same length: a plain slice is much cheaper
    used: int  # columns that attention may read: the longest row with its nodes
    nodes: Nodes | None = None  # who is above whom, where attention writes keys and values by itself


@dataclass(frozen=True)
class Columns:
    """Keys and values of T tokens of one text, on the host; a layer that writes none has none.

    layers   number of the layer -> keys [H, T, E] and values; the number behind the last is the taps'
    """

    layers: Mapping[int, tuple[Tensor, Tensor]]

    @property
    def num_tokens(self) -> int:
        """T."""
        return next((keys.shape[1] for keys, _ in self.layers.values()), 0)

    @property
    def num_bytes(self) -> int:
        """Memory that they take."""
        return sum(part.numel() * part.element_size() for parts in self.layers.values() for part in parts)

    def behind(self, count: int) -> "Columns":
        """Those behind the first `count` tokens."""
        if not count:
            return self
        return Columns({number: (keys[:, count:], values[:, count:]) for number, (keys, values) in self.layers.items()})


class TreeLayer(CacheLayerMixin):
    """One layer's keys and values [rows, H, C, E]: full length for every kind of layer, windows are in the mask."""

    is_sliding = False

    def __init__(self, num_rows: int, capacity: int, window: int | None = None) -> None:
        super().__init__()
        self.num_rows = num_rows
        self.capacity = capacity
        self.window = window
        self.allocate: Allocate = new_memory
        self.attended = False  # whether attention came back to this layer
        self.place: Place | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take the heads, width, dtype and device of the first keys and values."""
        self.device = key_states.device
        self._take_room(key_states, value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write N new columns of the placed rows; the used part of those rows is what attention reads.

        Where attention writes by itself it gets the new ones alone, and this layer with the keys.
        """
        assert self.place is not None, "TreeCache.place() comes before every forward"
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.make_room(self.place.used)
        if self.place.nodes is not None:
            key_states.tree_layer = self  # type: ignore[attr-defined]
            return key_states, value_states
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Write the new keys and values, and attend to all that each node may look at [B, N, heads, E]."""
        place = self.place
        assert place is not None
        assert place.nodes is not None
        self.attended = True
        keys, values = self.keys[place.rows], self.values[place.rows]
        return attend(query, key, value, keys, values, place.nodes, self.window, scale)

    def room(self, place: Place) -> tuple[Tensor, Tensor, int | None]:
        """Keys and values of the placed rows, grown to the columns in use, and the window."""
        self.make_room(place.used)
        return self.keys[place.rows], self.values[place.rows], self.window

    def _write(self, store: Tensor, new: Tensor) -> Tensor:
        place = self.place
        assert place is not None
        rows = store[place.rows]
        if place.start is not None:
            rows[:, :, place.start : place.start + new.shape[2]] = new
        else:
            every = torch.arange(new.shape[0], device=new.device)[:, None]
            rows[every, :, place.columns_BN.to(new.device)] = new.transpose(1, 2)
        return rows[:, :, : place.used]

    def make_room(self, columns: int) -> None:
        """Hold at least so many columns, with what is in them."""
        if columns > self.capacity:
            self.reshape(self.num_rows, -(-columns // BLOCK) * BLOCK)

    def reshape(self, num_rows: int, columns: int) -> None:
        """Hold so many rows and columns, with what is in those that stay."""
        stay, self.num_rows, self.capacity = min(self.num_rows, num_rows), num_rows, columns
        if not self.is_initialized:
            return
        held = self.keys, self.values
        self._take_room(*held)
        for new, old in zip((self.keys, self.values), held, strict=True):
            used = min(new.shape[2], old.shape[2])
            new[:stay, :, :used] = old[:stay, :, :used]
            new[stay:] = 0  # memory that others had before may hold what is no number

    def _take_room(self, *like: Tensor) -> None:
        """New keys and values, in number of heads, width, dtype and device like these two."""
        self.keys, self.values = (
            self.allocate(kind, (self.num_rows, each.shape[1], self.capacity, each.shape[3]), each)
            for kind, each in zip(("keys", "values"), like, strict=True)
        )
        self.capacity = min(self.keys.shape[2], self.values.shape[2])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The library builds no mask for us; it still asks."""
        return self.place.used if self.place else query_length, 0

    def get_seq_length(self) -> int:
        """Columns in use; rows differ, positions are always given explicitly."""
        return self.place.used if self.place else 0

    def get_max_length(self) -> int:
        """No fixed maximum: layers grow."""
        return -1

    get_max_cache_shape = get_max_length  # the name before transformers 5.24


class TreeCache(Cache):
    """Keys and values for `num_rows` rows; `lengths[b]` tokens of row b are committed.

    Only `keep`, `commit`, `drop`, `shorten`, `append_columns` and the copies change lengths: writing nodes commits
    nothing.

    taps   states of inner layers beside the keys, where a drafter wants some: what a row borrows, it borrows with them
    """

    def __init__(
        self, num_layers: int, num_rows: int, capacity: int, windows: Sequence[int | None] | None = None
    ) -> None:
        windows = windows or [None] * num_layers
        super().__init__(layers=[TreeLayer(num_rows, capacity, window) for window in windows])
        self.num_rows = num_rows
        self.lengths = [0] * num_rows
        self.taps = TreeLayer(num_rows, capacity)

    @torch.inference_mode()
    def reshape(self, num_rows: int, columns: int) -> None:
        """Hold so many rows and columns; rows that go are empty, and no row is longer."""
        assert not any(self.lengths[num_rows:])
        assert max(self.lengths, default=0) <= columns
        for layer in (*self.layers, self.taps):
            layer.reshape(num_rows, columns)
        del self.lengths[num_rows:]
        self.lengths.extend([0] * (num_rows - len(self.lengths)))
        self.num_rows = num_rows

    def place(self, rows: slice, num_nodes: int, device: torch.device, tree: TokenTree | None = None) -> Place:
        """Say where the next forward writes; returns the same for building masks.

        With a tree, attention writes keys and values by itself.
        """
        place = self._where(rows, num_nodes, device, tree)
        for layer in self.layers:
            layer.place = place
        return place

    def _where(self, rows: slice, num_nodes: int, device: torch.device, tree: TokenTree | None) -> Place:
        lengths = self.lengths[rows]
        start = lengths[0] if len(set(lengths)) == 1 else None
        columns_BN = numbers_on(device, lengths)[:, None] + torch.arange(num_nodes, device=device)
        return Place(
            slice(rows.start or 0, (rows.start or 0) + len(lengths)),
            columns_BN,
            start,
            max(lengths) + num_nodes,
            None
            if tree is None
            else Nodes(torch.tensor(lengths), tree.ancestors_XNN.contiguous(), tree.depths_XN.contiguous()),
        )

    def stores(self, place: Place) -> list[tuple[Tensor, Tensor, int | None]]:
        """Keys and values of the placed rows with room for the placed columns, and the window, layer by layer."""
        return [layer.room(place) for layer in self.layers]

    def write_taps(self, rows: slice, taps_BNLH: Tensor | None) -> None:
        """Write what inner layers were like at the nodes of a forward, where its keys and values stand."""
        if taps_BNLH is not None:
            self.taps.place = self._where(rows, taps_BNLH.shape[1], taps_BNLH.device, None)
            states_BLNH = taps_BNLH.transpose(1, 2)
            self.taps.update(states_BLNH, states_BLNH[..., :0])

    def read_taps(self, rows: slice) -> Tensor | None:
        """States of inner layers [B, T, L, H] at the committed tokens of these rows; None where nobody wanted any."""
        if not self.taps.is_initialized:
            return None
        return self.taps.keys[rows, :, : max(self.lengths[rows])].transpose(1, 2)

    def commit(self, rows: slice, counts: Sequence[int]) -> None:
        """Keep the first counts[b] nodes of each placed row: what prefill does, where the tree is a chain."""
        for row, count in zip(range(rows.start, rows.stop), counts, strict=True):
            self.lengths[row] += count

    def keep(self, verdict: Verdict) -> None:
        """Move each row's surviving path behind its committed tokens and forget the other nodes."""
        assert verdict.kept is not None, "rows.limit comes before keep"
        assert verdict.paths is not None
        moved = [
            any(node != place for place, node in enumerate(path[:kept]))
            for path, kept in zip(verdict.paths, verdict.kept, strict=True)
        ]
        if any(moved):
            self._gather(verdict.path_BD)
        self.commit(slice(0, len(verdict.kept)), verdict.kept)

    def _gather(self, path_BD: Tensor) -> None:
        """Columns length + path[d] go to length + d. Places past a path's end stay as they are."""
        num_rows, num_places = path_BD.shape
        device = path_BD.device
        to_BD = numbers_on(device, self.lengths[:num_rows])[:, None] + torch.arange(num_places, device=device)
        from_BD = torch.where(path_BD < 0, to_BD, to_BD[:, :1] + path_BD)
        if num_rows == 1:
            start = self.lengths[0]
            for layer in self._written:
                for store in (layer.keys, layer.values):
                    store[:1, :, start : start + num_places] = store[:1].index_select(2, from_BD[0].to(store.device))
            return
        every = torch.arange(num_rows, device=device)[:, None]
        for layer in self._written:
            # layers may lie on several devices
            row_B1, new_BD, old_BD = (index.to(layer.keys.device) for index in (every, to_BD, from_BD))
            for store in (layer.keys, layer.values):
                store[row_B1, :, new_BD] = store[row_B1, :, old_BD]

    def copy_row(self, source: int, destination: int) -> None:
        """Overwrite one row by another: how a hole left by a finished row is filled."""
        self.copy_prefix(source, slice(destination, destination + 1), self.lengths[source])

    @torch.inference_mode()
    def copy_prefix(self, source: int, destinations: slice, length: int) -> None:
        """Begin rows with the first `length` tokens of another: what texts share is read once."""
        assert length <= self.lengths[source]
        for layer in self._written:
            for store in (layer.keys, layer.values):
                store[destinations, :, :length] = store[source, :, :length]
        self.lengths[destinations] = [length] * (destinations.stop - destinations.start)

    @torch.inference_mode()
    def read_columns(self, row: int, start: int, end: int) -> Columns:
        """A copy of what a row holds of its committed tokens from `start` to `end`."""
        assert start < end <= self.lengths[row]
        return Columns(
            {
                number: (_on_host(layer.keys[row, :, start:end]), _on_host(layer.values[row, :, start:end]))
                for number, layer in enumerate((*self.layers, self.taps))
                if layer.is_initialized
            }
        )

    @torch.inference_mode()
    def append_columns(self, row: int, columns: Columns, device: torch.device) -> None:
        """Commit what was read elsewhere of a row's next tokens.

        device   of layers that hold nothing yet
        """
        start, layers = self.lengths[row], (*self.layers, self.taps)
        end = start + columns.num_tokens
        for number, parts in columns.layers.items():
            layer = layers[number]
            if not layer.is_initialized:
                layer.lazy_initialization(*(part[None].to(device) for part in parts))
            layer.make_room(end)
            layer.keys[row, :, start:end], layer.values[row, :, start:end] = parts
        self.lengths[row] = end

    def close_gap(self, place: int, count: int, num_rows: int) -> None:
        """Move the rows behind `count` rows that are free, from `place` on, up into them; `num_rows` stay in all."""
        for row in range(place, num_rows):
            self.copy_row(row + count, row)
        for row in range(num_rows, num_rows + count):
            self.drop(row)

    def drop(self, row: int) -> None:
        """Forget a row."""
        self.lengths[row] = 0

    def shorten(self, row: int, length: int) -> None:
        """Forget a row's tokens from a length on."""
        assert length <= self.lengths[row]
        self.lengths[row] = length

    @torch.inference_mode()
    def wipe(self) -> None:
        """Zero all that is not committed: what a mask hides still spoils a sum when it is no number."""
        for layer in self._written:
            for row, length in enumerate(self.lengths):
                layer.keys[row, :, length:] = 0
                layer.values[row, :, length:] = 0

    @property
    def _written(self) -> list[TreeLayer]:
        """Layers that hold something: some models' last layers read the keys of earlier ones, and write none."""
        return [layer for layer in (*self.layers, self.taps) if layer.is_initialized]

    def num_bytes(self) -> int:
        """Memory held by all layers, in bytes."""
        stores = [store for layer in self._written for store in (layer.keys, layer.values)]
        return sum(store.numel() * store.element_size() for store in stores)


def _on_host(held: Tensor) -> Tensor:
    """A copy that shares no memory with the cache."""
    return held.to("cpu", copy=True).contiguous()
