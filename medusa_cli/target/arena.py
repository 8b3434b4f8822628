"""Keys and values that stay where they are while caches come and go: a recorded forward reads and writes addresses.

Shape letters: B rows, H key/value heads, C cache columns, E head width.
"""

import functools
import weakref

import torch
from torch import Tensor

from medusa_cli.target.cache import TreeCache

COLUMNS = 256  # they come in multiples of this


class Arena:
    """Stores for every layer's keys and values, lent to one cache at a time.

    moves   how often a store was made or made anew: addresses known before then are void
    """

    def __init__(self) -> None:
        self.moves = 0
        self._stores: dict[tuple[int, str], Tensor] = {}
        self._borrower: weakref.ref[TreeCache] | None = None

    @torch.inference_mode()
    def lend_to(self, cache: TreeCache) -> bool:
        """Let an empty cache keep its keys and values here; False while another one that is in use does."""
        if self._borrower is not None and self._borrower() is not None:
            return False
        self._borrower = weakref.ref(cache)
        for number, layer in enumerate(cache.layers):
            layer.allocate = functools.partial(self._store, number)
        for store in self._stores.values():
            store.zero_()  # what is not finite would reach through a mask
        return True

    def is_lent_to(self, cache: TreeCache) -> bool:
        """Whether this cache's keys and values are here."""
        return self._borrower is not None and self._borrower() is cache

    def _store(self, number: int, kind: str, shape: tuple[int, int, int, int], like: Tensor) -> Tensor:
        """Room for [B, H, C, E] of one layer's keys or values: what there is when it is large enough."""
        rows, columns = shape[0], shape[2]
        held = self._stores.get((number, kind))
        if held is None or held.shape[0] < rows or held.shape[2] < columns:
            held = _larger(held, shape, like)
            self._stores[number, kind] = held
            self.moves += 1
        return held[:rows]


def _larger(held: Tensor | None, shape: tuple[int, int, int, int], like: Tensor) -> Tensor:
    """A new store for this shape, no smaller than the old one in rows and columns; the cache copies what was in it.

    Where columns grow, they do by a quarter at least, so that addresses change seldom.
    """
    rows, heads, columns, width = shape
    if held is not None:
        grown = held.shape[2] * 5 // 4 if columns > held.shape[2] else held.shape[2]
        rows, columns = max(rows, held.shape[0]), max(columns, grown)
    columns = max(1, -(-columns // COLUMNS)) * COLUMNS
    return torch.zeros(rows, heads, columns, width, dtype=like.dtype, device=like.device)
