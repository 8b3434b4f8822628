"""A tiny llama, its texts, drafters that know them, and a count of its forwards."""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from medusa_cli.contracts import Draft, Seen, Verdict
from medusa_cli.heads.config import MedusaConfig
from medusa_cli.heads.medusa import MedusaHeads
from medusa_cli.model.cache import TreeCache
from medusa_cli.model.prefill import Piece
from medusa_cli.model.target import Target
from medusa_cli.trees.tree import TokenTree
from tests.fakes import KnowingDrafter, OracleDrafter
from tests.tiny_models import known, target_of, tiny_model

DEPTH = 5
TEXTS = functools.cache(lambda: known("llama"))
TARGET = functools.cache(lambda: target_of(tiny_model("llama")))


def deep(num_rows: int, rng: torch.Generator) -> TokenTree:
    """A chain beside a few wrong guesses, so that the right nodes are not the first columns."""
    return TokenTree.from_paths([*([0] * depth for depth in range(1, DEPTH + 1)), [1], [2], [1, 0]])


def oracle() -> KnowingDrafter:
    return OracleDrafter(TEXTS().texts, deep)


class Counter:
    """Counts the target's forwards and keeps the cache's lengths after each step."""

    def __init__(self, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prefilled: list[int] = []
        self.num_verified = 0
        self.lengths: list[list[int]] = []
        read_piece, verify, keep = target.read_piece, target.verify, TreeCache.keep

        def counted_piece(piece: Piece, *more: Any) -> Seen:
            self.prefilled.append(len(piece.ids))
            return read_piece(piece, *more)

        def counted_verify(draft: Draft, cache: TreeCache, **named: Any) -> Seen:
            self.num_verified += 1
            before = list(cache.lengths)
            seen = verify(draft, cache, **named)
            assert cache.lengths == before
            return seen

        def watched_keep(cache: TreeCache, verdict: Verdict) -> None:
            keep(cache, verdict)
            self.lengths.append(list(cache.lengths))

        monkeypatch.setattr(target, "read_piece", counted_piece)
        monkeypatch.setattr(target, "verify", counted_verify)
        monkeypatch.setattr(TreeCache, "keep", watched_keep)


def up_to(ids: Sequence[int], stops: frozenset[int]) -> list[int]:
    """The ids up to the first stop, which belongs to them."""
    ends = [place for place, token in enumerate(ids) if token in stops]
    return list(ids[: ends[0] + 1] if ends else ids)


def random_heads(draft_ids: Sequence[int]) -> MedusaHeads:
    target = TARGET()
    config = MedusaConfig(
        num_heads=3,
        num_layers=1,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab=len(draft_ids),
        own_output=False,
        output_bias=False,
        target_name=target.name,
        target_fingerprint=target.fingerprint,
    )
    heads = MedusaHeads.fresh(config, torch.tensor(draft_ids), target.output_weight, None)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn(parameter.shape) / 4)
    return heads.eval().requires_grad_(False)


HEADS_TREE = TokenTree.from_paths([[0], [1], [2], [0, 0], [1, 0], [0, 0, 0]])
