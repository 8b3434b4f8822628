"""Target: the big model behind three verbs. What is to be known of it stands in facts.py.

It knows no drafter, no rule and no loop. Shape letters: B rows, N nodes, T positions, H hidden, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from medusa_cli.contracts import Draft, Memory, Seen
from medusa_cli.kernels.attend import MOST_NODES, can_attend
from medusa_cli.model import attention
from medusa_cli.model.cache import Place, TreeCache
from medusa_cli.model.facts import Facts
from medusa_cli.model.forward_memory import ForwardMemory
from medusa_cli.model.forwards import Forward, Work
from medusa_cli.model.identity import Identity
from medusa_cli.model.masks import MaskKinds
from medusa_cli.model.prefill import OnRead, Piece, pieces
from medusa_cli.model.rotary import RotaryTables, TableSpans
from medusa_cli.model.runners.cuda_graphs import Inputs
from medusa_cli.model.runners.kinds import RUNNERS, give_back_freed_memory
from medusa_cli.model.runners.stock import StockForward
from medusa_cli.trees.tree import Ancestry, TokenTree

GIVE_BACK_FROM = 32 * 2**20  # bytes of a forward: the memory of smaller ones is kept for the next


@dataclass(frozen=True)
class States:
    """Hidden states of texts: what the output sees at each token, and what went into inner layers, if wanted."""

    hidden_BNH: Tensor
    taps_BNLH: Tensor | None


class Target(Facts):
    """A loaded causal language model. Stock modelling code, verified by trees through masks and positions.

    model       a transformers causal LM in eval mode; its linear layers may have been packed
    tokenizer   its tokenizer, or None for tests on ids
    kinds       layer kind -> window, as `masks.tree_masks` wants them
    stop_ids    ids that end a text
    """

    def __init__(
        self, model: Any, tokenizer: Any, kinds: MaskKinds, stop_ids: frozenset[int], identity: Identity
    ) -> None:
        super().__init__(StockForward(model, kinds), tokenizer, stop_ids, identity)
        self.forwards: tuple[Forward, ...] = ()

    def use(self, *forwards: Forward) -> None:
        """Ask these forwards, in this order, and let the stock one run what none of them takes."""
        self.forwards = forwards

    @cached_property
    def tables(self) -> RotaryTables:
        """Which rotary table turns which node."""
        return RotaryTables(self.model, self.stock.cache_name)

    @cached_property
    def cache_bytes_per_token(self) -> int:
        """Bytes that one token takes in the cache, all layers together: measured."""
        cache = self.new_cache(1, 1)
        self.prefill([[0]], cache)
        return cache.num_bytes() // cache.layers[0].capacity

    def new_cache(self, num_rows: int, capacity: int) -> TreeCache:
        """An empty cache for `num_rows` rows with room for `capacity` columns each (it grows when needed)."""
        cache = self._cache(num_rows, capacity)
        for forward in self.forwards:
            forward.lend_to(cache)
        return cache

    def columns_for(self, longest: int, num_nodes: int) -> int:
        """Columns that forwards hold beyond what is asked for so many committed tokens and nodes; 0 where none does."""
        return max((forward.columns_for(longest, num_nodes) for forward in self.forwards), default=0)

    def release(self) -> None:
        """Give back the memory that is held for texts to come, unless one is being written."""
        for forward in self.forwards:
            forward.release()

    def _cache(self, num_rows: int, capacity: int) -> TreeCache:
        return TreeCache(self.num_layers, num_rows, capacity, self.windows)

    @cached_property
    def attends_natively(self) -> bool:
        """Whether attention to a few nodes runs in the compiled kernel: beside packed layers, where it can be had.

        Tried with one node: some models rework what the cache gives back, and attention never meets the layer again.
        """
        packed = RUNNERS[self.identity.runner].packs
        if not packed or self.identity.attention != attention.NAME or not can_attend():
            return False
        cache, root = self.new_cache(1, 1), TokenTree.empty()
        self.stock(torch.zeros(1, 1, dtype=torch.long), root, cache.place(slice(0, 1), 1, self.device, root), cache)
        return all(layer.attended for layer in cache.layers)

    @cached_property
    def forward_memory(self) -> ForwardMemory:
        """What a forward takes beside weights and cache."""
        on_cpu, kinds = self.device.type == "cpu", len(self.kinds)
        return ForwardMemory.of(self.config, self.dtype.itemsize, self.identity.attention, kinds=kinds, on_cpu=on_cpu)

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        cache: TreeCache,
        first_row: int = 0,
        as_long_as: Sequence[int] | None = None,
        on_read: OnRead | None = None,
        taps: tuple[int, ...] = (),
    ) -> Seen:
        """Read prompts into rows, from `first_row` on, and commit them; shows each one's last position (N = 1).

        What these rows hold already is the beginning of their prompts: only the rest is read, in pieces.

        as_long_as   the text length whose rotary table turns each prompt, up to that length; None: its own
        taps         inner layers whose states the cache is to hold (model/taps.py)
        """
        held = cache.lengths[first_row : first_row + len(prompts)]
        unread, read, shown = sum(map(len, prompts)) - sum(held), 0, []
        for piece in pieces(prompts, held, self.forward_memory, as_long_as):
            seen = self.read_piece(piece, cache, first_row, taps)
            if piece.is_last:
                shown.append(seen)
            read += piece.num_tokens
            if on_read is not None:
                on_read(read, unread)
        if len(shown) == 1:
            return shown[0]
        return Seen(torch.cat([seen.hidden_BNH for seen in shown]), torch.cat([seen.logits_BNV for seen in shown]))

    @torch.inference_mode()
    def read_piece(self, piece: Piece, cache: TreeCache, first_row: int = 0, taps: tuple[int, ...] = ()) -> Seen:
        """Read one piece of prompts whose first row is `first_row`, and commit it; shows each row's last position."""
        rows = slice(first_row + piece.row, first_row + piece.row + len(piece.ids))
        tokens_BN = piece.tokens_BN.to(self.device)
        last_B1 = torch.tensor(piece.lengths, device=self.device)[:, None] - 1
        chain = TokenTree.chain(tokens_BN.shape[1] - 1)
        ends = [held + read for held, read in zip(cache.lengths[rows], piece.lengths, strict=True)]
        spans = TableSpans(piece.as_long_as, ends)
        seen = self._forward(Work(tokens_BN, chain.to(self.device), cache, rows, last_B1, spans, taps))
        cache.commit(rows, piece.lengths)
        return seen

    @torch.inference_mode()
    def verify(
        self,
        draft: Draft,
        cache: TreeCache,
        as_long_as: Sequence[int] | None = None,
        taps: tuple[int, ...] = (),
    ) -> Seen:
        """Score every node of the draft with one forward. Commits nothing: `cache.keep` does.

        as_long_as   as of `prefill`, for nodes that are the beginning of a text; None: they come after one
        taps         inner layers whose states are wanted (model/taps.py)
        """
        rows, spans = slice(0, len(draft.tokens_BN)), None
        if self.tables.vary:
            ends = [length + draft.tree.max_depth + 1 for length in cache.lengths[rows]]
            spans = TableSpans(as_long_as or [0] * len(ends), ends)
        return self._forward(Work(draft.tokens_BN, draft.tree.to(self.device), cache, rows, None, spans, taps))

    def ready(
        self, draft: Draft, texts: Sequence[Sequence[int]], cache: TreeCache, memory: Memory | None = None
    ) -> Draft:
        """The draft as far as it can be verified at once; rows whose rotary table changes here are read anew before.

        texts    each row's tokens so far, the root included
        memory   is shown what a row that is read anew looks like now, where it wants to see inner layers
        """
        if not self.tables.turns:
            return draft
        lengths, taps = cache.lengths[: len(texts)], memory.taps if memory else ()
        for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
            if length in self.tables.turns:
                cache.drop(row)
                self.prefill([text[:length]], cache, row, as_long_as=[length + 1], taps=taps)
                if memory and taps:
                    memory.join(row, [text[:length]], cache.read_taps(slice(row, row + 1)))
        return self.tables.until_turn(draft, lengths)

    def hidden(self, texts: Sequence[Sequence[int]], prompts: Sequence[int] | None = None) -> Tensor:
        """Final normed hidden states [B, T, H] of texts, zeros past each one's end. They are read in pieces.

        prompts   tokens of each text that were given at once, as decoding sees them; None: all
        """
        return self.states(texts, prompts).hidden_BNH

    @torch.inference_mode()
    def states(
        self, texts: Sequence[Sequence[int]], prompts: Sequence[int] | None = None, taps: tuple[int, ...] = ()
    ) -> States:
        """As `hidden`, with those of inner layers."""
        self.release()
        lengths = list(map(len, texts))
        shape = len(texts), max(lengths), self.hidden_size
        hidden_BTH = torch.zeros(shape, dtype=self.dtype, device=self.device)
        taps_BTLH: Tensor | None = None
        for start, firsts in self.tables.readings(prompts or lengths, lengths):
            # what is read anew when tables change is read anew for those who remember inner states as well
            taps_BTLH = self._read_into(hidden_BTH, start, texts, firsts, taps)
        return States(hidden_BTH, taps_BTLH)

    def _read_into(
        self,
        hidden_BTH: Tensor,
        start: int,
        texts: Sequence[Sequence[int]],
        firsts: Sequence[int],
        taps: tuple[int, ...],
    ) -> Tensor | None:
        """Put the hidden states of whole texts in place, from `start` on; `firsts`: as prefill's `as_long_as`.

        Gives the states of inner layers of all that was read.
        """
        cache = self._cache(*hidden_BTH.shape[:2])
        for piece in pieces(texts, [0] * len(texts), self.forward_memory, firsts):
            begun = cache.lengths[piece.row]
            self.read_piece(piece, cache, taps=taps)
            shown = max(begun, start)
            for row, states_TH in enumerate(self.stock.last_BNH, start=piece.row):
                end = begun + piece.lengths[row - piece.row]
                hidden_BTH[row, shown:end] = states_TH[shown - begun : end - begun].to(self.device)
        return cache.read_taps(slice(0, len(texts)))

    def read(self, ids_BT: Tensor, lengths: Sequence[int]) -> Tensor:
        """As `hidden`, by the library's plain forward without a cache, which gradients can go back through.

        Rows are padded on the right: a causal model's states before the padding don't see it. Each row is turned by
        the rotary table of its own length: a text that was written across a change of tables is read as a prompt.
        """
        positions_BT = torch.arange(ids_BT.shape[1], device=self.device).expand(len(ids_BT), -1)
        spans = TableSpans(lengths, lengths)
        with self.tables.of(spans, [0] * len(ids_BT), positions_BT):
            return self.stock.plain(ids_BT)

    def _forward(self, work: Work) -> Seen:
        """By the first forward that takes it. States of inner layers go where the keys and values are."""
        forward = next((forward for forward in self.forwards if forward.takes(work)), self._stock_forward)
        seen = forward(work)
        work.cache.write_taps(work.rows, seen.taps_BNLH)
        return seen

    def _stock_forward(self, work: Work) -> Seen:
        tree, cache = work.tree, work.cache
        native = self.attends_natively and (tree.num_nodes <= MOST_NODES or self.in_integers)
        place = cache.place(work.rows, tree.num_nodes, self.device, tree if native else None)
        with self.tables.of(work.spans, cache.lengths[work.rows], self.stock.positions(tree, place)):
            return self._run(work.tokens_BN, tree, place, cache, work.wanted_BW, work.taps)

    @torch.inference_mode()
    def at(self, inputs: Inputs, cache: TreeCache) -> Seen:
        """The forward over inputs of a fixed place, as it is recorded: nothing in it is read on the host."""
        place = inputs.place()
        for layer in cache.layers:
            layer.place = place
        seen = self._run(inputs.tokens_BN, inputs, place, cache, None, inputs.bucket.taps)
        self.stock.forget()  # a graph's memory is given back when nobody looks at it
        return seen

    def _run(
        self,
        tokens_BN: Tensor,
        tree: Ancestry,
        place: Place,
        cache: TreeCache,
        wanted_BW: Tensor | None,
        taps: tuple[int, ...],
    ) -> Seen:
        """One forward that writes where `place` says."""
        seen = self.stock(tokens_BN, tree, place, cache, wanted_BW, taps)
        if (
            self.device.type == "cpu"
            and self.forward_memory.bytes(len(tokens_BN), tree.num_nodes, place.used) > GIVE_BACK_FROM
        ):
            give_back_freed_memory()
        return seen
