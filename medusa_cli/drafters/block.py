"""The block drafter: one pass over a block, in view of what the target was like at every place of the row before.

Its memory is a cache of the block's own few layers: keys and values of kept tokens, made of the target's inner states.
Shape letters: B rows, K places of the block, T positions, D places on a path, L tapped layers, H hidden.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from medusa_cli.contracts import Context, Draft
from medusa_cli.drafters.block_paths import CANDIDATES, Pairs, Places, places_of
from medusa_cli.drafters.trie import Picked, Trie, draft_of
from medusa_cli.heads.block import Attend, BlockHeads, Roots
from medusa_cli.kernels.attend import Nodes, attend, can_attend
from medusa_cli.model.cache import TreeCache
from medusa_cli.trees.dynamic import DynamicShape
from medusa_cli.trees.tree import TokenTree


class BlockDrafter:
    """Guesses K tokens after the root at once, and the likeliest paths through them; a source of guesses as well."""

    def __init__(self, heads: BlockHeads, shape: TokenTree | DynamicShape) -> None:
        """Raises TreeError when a fixed tree needs a place or rank that isn't there."""
        self.name = heads.config.type
        self.heads = heads
        self.shape = shape
        self.taps: tuple[int, ...] = heads.config.wanted_taps
        if isinstance(shape, TokenTree):
            shape.check_fits(heads.config.num_heads, min(CANDIDATES, heads.config.draft_vocab))
            self.size = shape.num_nodes - 1
        else:
            self.size = shape.size
        self.cache = TreeCache(heads.config.num_layers, 1, 0)
        self.near_BH = torch.zeros(1, heads.config.hidden_size, dtype=heads.dtype, device=heads.device)
        self._pairs = Pairs(heads)
        places = heads.config.num_heads
        whole_KK = torch.ones(places, places, dtype=torch.bool)
        self._among_KK = whole_KK.tril() if heads.config.causal else whole_KK
        self._native = heads.device.type == "cpu" and heads.dtype == torch.float32 and can_attend()

    @torch.inference_mode()
    def join(self, first_row: int, prompts: Sequence[Sequence[int]], taps_BTLH: Tensor | None) -> None:
        """Rows begin with what the target was like at each of their tokens."""
        rows = slice(first_row, first_row + len(prompts))
        if rows.stop > self.cache.num_rows:
            self.near_BH = F.pad(self.near_BH, (0, 0, 0, rows.stop - self.cache.num_rows))
            self.cache.reshape(rows.stop, self.cache.layers[0].capacity)
        for row in range(rows.start, rows.stop):
            self.cache.drop(row)
        for layer in self.cache.layers:
            if layer.is_initialized:  # what a mask hides still spoils a sum when it is no number
                layer.keys[rows] = layer.values[rows] = 0
        self._read(rows, taps_BTLH, list(map(len, prompts)))

    @torch.inference_mode()
    def keep(self, context: Context, taps_BDLH: Tensor | None) -> None:
        """What the target was like at the nodes that were kept."""
        rows = slice(0, len(context.tokens))
        held = self.cache.lengths[rows]
        self._read(rows, taps_BDLH, [len(text) - 1 - count for text, count in zip(context.tokens, held, strict=True)])

    @torch.inference_mode()
    def move(self, source: int, row: int) -> None:
        """What is remembered goes with the row."""
        self.cache.copy_row(source, row)
        self.near_BH[row] = self.near_BH[source]

    def drop(self, row: int) -> None:
        """Forget the row."""
        self.cache.drop(row)

    @torch.inference_mode()
    def propose(self, context: Context) -> Draft:
        """The fixed tree, or each row's likeliest paths. Reads guesses on the host."""
        found, roots = self._guesses(context), context.root_B.tolist()
        if isinstance(self.shape, TokenTree):
            parents, ranks = self.shape.parents_XN[0].tolist(), self.shape.ranks_XN[0].tolist()
            tokens = [places.fill(root, parents, ranks) for places, root in zip(found, roots, strict=True)]
            device = context.root_B.device
            return Draft(torch.tensor(tokens, device=device), self.shape.to(device))
        tries = [Trie(root) for root in roots]
        for places, trie in zip(found, tries, strict=True):
            places.add_likeliest(trie, self.size, self.shape.floor)
        return draft_of([Picked(trie, trie.likeliest(self.size)) for trie in tries], context.root_B.device)

    @torch.inference_mode()
    def add_guesses(self, context: Context, tries: Sequence[Trie], floor: float) -> None:
        """The likeliest paths of each row."""
        for places, trie in zip(self._guesses(context), tries, strict=True):
            places.add_likeliest(trie, self.size, floor)

    def _read(self, rows: slice, taps_BTLH: Tensor | None, counts: Sequence[int]) -> None:
        """Remember so many of each row's states: one product for all layers."""
        assert taps_BTLH is not None
        heads, held = self.heads, self.cache.lengths[rows]
        num_places, device = taps_BTLH.shape[1], taps_BTLH.device
        states_BTX = taps_BTLH.flatten(2).to(heads.dtype)
        if min(counts) < num_places:  # padding may hold what is no number
            padding_BT = torch.arange(num_places) >= torch.tensor(counts)[:, None]
            states_BTX = states_BTX.masked_fill(padding_BT[..., None].to(device), 0)
        place = self.cache.place(rows, num_places, device)
        context_BTH = heads.context(states_BTX)
        made = heads.keys_and_values(context_BTH, place.columns_BN, max(held) + num_places)
        for layer, (keys, values) in zip(self.cache.layers, made, strict=True):
            layer.update(keys.transpose(1, 2), values.transpose(1, 2))
        self.cache.commit(rows, counts)
        for row, count in enumerate(counts):
            if count:  # a row that has ended keeps nothing
                self.near_BH[rows.start + row] = context_BTH[row, count - 1]

    def _guesses(self, context: Context) -> list[Places]:
        """What each row's block guesses. Its own keys and values are written behind the row's, and forgotten."""
        heads, root_B = self.heads, context.root_B
        rows, places = slice(0, len(root_B)), heads.config.num_heads
        lengths = self.cache.lengths[rows]
        look = self._by_kernel(lengths) if self._native else self._by_library(rows, root_B.device)
        roots = Roots(root_B, torch.tensor(lengths, device=root_B.device), self.near_BH[rows])
        guessed_BKH = heads.guess(roots, max(lengths) + places, look)
        return places_of(heads, self._pairs, guessed_BKH)

    def _by_kernel(self, lengths: Sequence[int]) -> Attend:
        """Attention that writes and reads the cache in one call."""
        places, num_rows = len(self._among_KK), len(lengths)
        nodes = Nodes(torch.tensor(lengths), self._among_KK[None], torch.zeros(1, places, dtype=torch.long))
        scale = self.heads.config.head_size**-0.5

        def look(number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            layer = self.cache.layers[number]
            layer.make_room(max(lengths) + places)
            keys, values = layer.keys[:num_rows], layer.values[:num_rows]
            query, key, value = (each.transpose(1, 2) for each in (query, key, value))
            return attend(query, key, value, keys, values, nodes, None, scale).flatten(2)

        return look

    def _by_library(self, rows: slice, device: torch.device) -> Attend:
        """The library's attention over the columns in use."""
        places = len(self._among_KK)
        place = self.cache.place(rows, places, device)
        length_B11 = place.columns_BN[:, :1, None]
        columns = torch.arange(place.used, device=device)
        # columns behind the row's own are the block's, as far as its places see each other
        within_B1C = (columns - length_B11).clamp(0, places - 1)
        among_BKC = self._among_KK.to(device)[:, within_B1C[:, 0]].transpose(0, 1)
        seen_BKC = (columns < length_B11) | ((columns < length_B11 + places) & among_BKC)

        def look(number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.cache.layers[number].update(key.transpose(1, 2), value.transpose(1, 2))
            out = F.scaled_dot_product_attention(
                query.transpose(1, 2), keys, values, attn_mask=seen_BKC[:, None], enable_gqa=True
            )
            return out.transpose(1, 2).flatten(2)

        return look
