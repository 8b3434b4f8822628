"""A drafter with a memory: one attention layer with random weights over inner states, in a cache of its own.

Its one guess stands beside those of another drafter, which knows the text: so paths of every length are kept.
Shape letters: B rows, N nodes, T positions, L tapped layers, H hidden, V vocabulary, E head width.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from medusa_cli.contracts import Context, Draft, Step
from medusa_cli.decode.rows import Row, Rows
from medusa_cli.model.cache import TreeCache
from medusa_cli.model.target import Target
from medusa_cli.trees.tree import TokenTree
from tests.fakes import KnowingDrafter
from tests.tiny_models import VOCAB

HEADS, WIDTH = 2, 4


class AttendingDrafter:
    """Attends from the root to what it remembers of its row, one entry for each token that the target has read."""

    name, size = "attending", 40

    def __init__(self, inner: KnowingDrafter, taps: tuple[int, ...], hidden_size: int) -> None:
        self.inner = inner
        self.taps = taps
        rng = torch.Generator().manual_seed(3)
        seen = len(taps) * hidden_size
        self.key, self.value = (torch.randn(seen, HEADS * WIDTH, generator=rng) / seen**0.5 for _ in range(2))
        self.query = torch.randn(VOCAB, HEADS * WIDTH, generator=rng)
        self.out = torch.randn(HEADS * WIDTH, VOCAB, generator=rng)
        self.cache = TreeCache(1, 0, 0)
        self.moves = 0

    def join(self, first_row: int, prompts: Sequence[Sequence[int]], taps_BTLH: Tensor | None) -> None:
        rows = slice(first_row, first_row + len(prompts))
        if rows.stop > self.cache.num_rows:
            self.cache.reshape(rows.stop, self.cache.layers[0].capacity)
        for row in range(rows.start, rows.stop):
            self.cache.drop(row)
        self._read(rows, taps_BTLH, list(map(len, prompts)))

    def keep(self, context: Context, taps_BDLH: Tensor | None) -> None:
        rows = slice(0, len(context.tokens))
        held = self.cache.lengths[rows]
        self._read(rows, taps_BDLH, [len(text) - 1 - count for text, count in zip(context.tokens, held, strict=True)])

    def move(self, source: int, row: int) -> None:
        self.moves += 1
        self.cache.copy_row(source, row)

    def drop(self, row: int) -> None:
        self.cache.drop(row)

    def propose(self, context: Context) -> Draft:
        draft = self.inner.propose(context)
        logits_BV = self._attended(context.root_B)
        taken_BN = draft.tree.depths_XN.expand(len(logits_BV), -1) == 1
        every_BN = torch.arange(len(logits_BV))[:, None].expand_as(taken_BN)
        logits_BV[every_BN[taken_BN], draft.tokens_BN[taken_BN]] = -torch.inf  # siblings differ
        return under_the_root(draft, logits_BV.argmax(-1))

    def keys_of(self, taps_TLH: Tensor) -> Tensor:
        """What such states leave in the cache [HEADS, T, E]."""
        return (taps_TLH.flatten(1) @ self.key).unflatten(-1, (HEADS, WIDTH)).transpose(0, 1)

    def _read(self, rows: slice, taps_BTLH: Tensor | None, counts: Sequence[int]) -> None:
        assert taps_BTLH is not None
        assert taps_BTLH.shape[2] == len(self.taps)
        assert taps_BTLH.shape[1] >= max(counts)
        seen_BTX = taps_BTLH.flatten(2)
        keys, values = (
            (seen_BTX @ weight).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for weight in (self.key, self.value)
        )
        self.cache.place(rows, taps_BTLH.shape[1], seen_BTX.device)
        self.cache.layers[0].update(keys, values)
        self.cache.commit(rows, counts)

    def _attended(self, root_B: Tensor) -> Tensor:
        """Logits of the token after the root [B, V]. The root's own entry is written, and forgotten."""
        query_BHE = self.query[root_B].unflatten(-1, (HEADS, WIDTH))
        place = self.cache.place(slice(0, len(root_B)), 1, root_B.device)
        keys, values = self.cache.layers[0].update(query_BHE[:, :, None], query_BHE[:, :, None])
        scores_BHC = torch.einsum("bhe,bhce->bhc", query_BHE, keys)
        unseen_BC = torch.arange(place.used) > place.columns_BN
        weights_BHC = scores_BHC.masked_fill(unseen_BC[:, None], -torch.inf).softmax(-1)
        return torch.einsum("bhc,bhce->bhe", weights_BHC, values).flatten(1) @ self.out


def under_the_root(draft: Draft, guess_B: Tensor) -> Draft:
    """The draft with one more guess for the token after the root."""
    tree = draft.tree
    one = torch.zeros(len(tree.parents_XN), 1, dtype=torch.long)
    ranks = one + int(tree.ranks_XN.max()) + 1
    grown = TokenTree(
        torch.cat([tree.parents_XN, one], 1),
        torch.cat([tree.ranks_XN, ranks], 1),
        torch.cat([tree.real_XN, one == 0], 1),
    )
    return Draft(torch.cat([draft.tokens_BN, guess_B[:, None]], 1), grown)


Fresh = Callable[[Row, Sequence[int]], Tensor]
"""(a row, its tokens that are read) -> the states of the tapped layers [T, L, H] at each of them"""


def states_of(model: Any, ids: Sequence[int], taps: Sequence[int]) -> Tensor:
    """What the library's plain forward over one text shows [T, L, H]."""
    states = model(torch.tensor([list(ids)]), output_hidden_states=True).hidden_states
    return torch.stack([states[tap][0] for tap in taps], 1)


def by_the_library(model: Any, taps: Sequence[int]) -> Fresh:
    """As one plain forward of the library over the text says."""
    return lambda row, ids: states_of(model, ids, taps)


def by_the_target(target: Target, taps: tuple[int, ...]) -> Fresh:
    """As the target reads the text anew, by the rotary tables that it was written with."""

    def fresh(row: Row, ids: Sequence[int]) -> Tensor:
        cache = target.new_cache(1, len(ids))
        first = target.tables.first_length(row.prompt_tokens, len(ids))
        target.prefill([list(ids)], cache, as_long_as=[first], taps=taps)
        taps_1TLH = cache.read_taps(slice(0, 1))
        assert taps_1TLH is not None
        return taps_1TLH[0]

    return fresh


class MemoryCheck:
    """The cache law for the drafter's cache: after every step it is what a fresh reading of each text would give."""

    def __init__(self, drafter: AttendingDrafter, fresh: Fresh, layers: Sequence[int] | None = None) -> None:
        """layers: those of what the target shows that this drafter is shown; None: all."""
        self.drafter, self.fresh = drafter, fresh
        self.layers = list(range(len(drafter.taps))) if layers is None else list(layers)
        self.num_checks = self.num_moved = 0

    @torch.inference_mode()
    def after(self, rows: Rows, step: Step) -> None:
        held = self.drafter.cache
        for index, row in enumerate(rows.active):
            length = rows.cache.lengths[index]
            assert held.lengths[index] == length
            wanted_TLH = self.fresh(row, row.tokens[:length])
            shown = rows.cache.read_taps(slice(index, index + 1))
            assert shown is not None
            close(shown[0][:, self.layers], wanted_TLH)
            close(held.layers[0].keys[index, :, :length], self.drafter.keys_of(wanted_TLH))
            self.num_checks += 1
            self.num_moved += len(step.tokens[index]) > 1


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
