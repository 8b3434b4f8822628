"""Keys and values that stay where they are while caches come and go: a recorded forward reads and writes addresses.

Shape letters: B rows, H key/value heads, C cache columns, E head width.
"""

import functools
import weakref

import torch
from torch import Tensor

from medusa_cli.model.cache import TreeCache

COLUMNS = 256  # they come in multiples of this


class Arena:
    """Stores for every layer's keys and values, lent to one cache at a time.

    moves   how often a store was made, made anew or given up: addresses known before then are void
    """

    def __init__(self) -> None:
        self.moves = 0
        self._stores: dict[tuple[int, str], Tensor] = {}
        self._borrower: weakref.ref[TreeCache] | None = None

    @torch.inference_mode()
    def lend_to(self, cache: TreeCache) -> bool:
        """Let an empty cache keep its keys and values here; False while another one that is in use does."""
        if self.is_lent:
            return False
        self._borrower = weakref.ref(cache)
        for number, layer in enumerate(cache.layers):
            layer.allocate = functools.partial(self._store, number)
        for store in self._stores.values():
            store.zero_()  # what is not finite would reach through a mask
        return True

    @property
    def is_lent(self) -> bool:
        """Whether a cache that is in use keeps its keys and values here."""
        return self._borrower is not None and self._borrower() is not None

    def is_lent_to(self, cache: TreeCache) -> bool:
        """Whether this cache's keys and values are here."""
        return self._borrower is not None and self._borrower() is cache

    @property
    def num_bytes(self) -> int:
        """Memory that is held, lent or not."""
        return sum(store.numel() * store.element_size() for store in self._stores.values())

    def give_up(self) -> None:
        """Hold nothing any more. Not while it is lent."""
        assert not self.is_lent
        self.moves += 1
        self._stores.clear()

    def _store(self, number: int, kind: str, shape: tuple[int, int, int, int], like: Tensor) -> Tensor:
        """Room for [B, H, C, E] of one layer's keys or values: what there is when it is large enough.

        Else a new store of this shape, in whole COLUMNS, whatever the old one had more of: many short texts and one
        long text would together need what neither does.
        """
        rows, heads, columns, width = shape
        held = self._stores.get((number, kind))
        if held is None or held.shape[0] < rows or held.shape[2] < columns:
            columns = max(1, -(-columns // COLUMNS)) * COLUMNS
            held = torch.zeros(rows, heads, columns, width, dtype=like.dtype, device=like.device)
            self.moves += 1  # first: addresses are void from here on, whatever interrupts this
            self._stores[number, kind] = held
        return held[:rows]
