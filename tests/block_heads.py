"""Block heads with random numbers, and the check of what their drafter remembers."""

from collections.abc import Sequence
from typing import Any

import torch

from medusa_cli.config.recipe import HeadsSettings
from medusa_cli.contracts import Context, Step
from medusa_cli.decode.rows import Rows
from medusa_cli.drafters.block import BlockDrafter
from medusa_cli.drafters.trie import ROOT, Trie
from medusa_cli.heads.block import BlockHeads
from medusa_cli.heads.block_config import BlockConfig
from medusa_cli.model.target import Target
from medusa_cli.trees.dynamic import DynamicShape
from medusa_cli.trees.tree import TokenTree
from tests.attending import Fresh, close
from tests.fakes import following

PLACES = 4


def block_config(target: Target, *, draft_vocab: int = 40, num_heads: int = PLACES, **options: Any) -> BlockConfig:
    settings = HeadsSettings(
        type="block", num_layers=2, num_heads=num_heads, options={"rank": 6, "near": True, **options}
    )
    return BlockConfig.of(
        settings,
        hidden_size=target.hidden_size,
        tap_size=target.tap_size,
        num_layers_seen=target.num_layers,
        vocab_size=target.vocab_size,
        draft_vocab=draft_vocab,
        output_bias=target.output_bias is not None,
        target_name="tiny",
        target_fingerprint="x",
    )


def block_heads(target: Target, **options: Any) -> BlockHeads:
    """Heads whose numbers are large enough that what they see shows in what they guess."""
    config = block_config(target, **options)
    heads = BlockHeads.fresh(config, torch.arange(config.draft_vocab) * 2, target.output_weight, target.output_bias)
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in heads.parameters():
            noise = torch.randn(parameter.shape, generator=rng)
            parameter.copy_(noise / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else parameter + 0.1 * noise)
    return heads.requires_grad_(False)


class HelpedDrafter(BlockDrafter):
    """Random guesses are hardly ever right: up to `depth` known tokens stand beside them, so paths are kept."""

    def __init__(self, heads: BlockHeads, size: int, texts: Sequence[Sequence[int]], depth: int = 3) -> None:
        super().__init__(heads, DynamicShape(size))
        self.texts, self.depth = texts, depth
        self.num_guessed = self.moves = 0

    def add_guesses(self, context: Context, tries: Sequence[Trie], floor: float) -> None:
        super().add_guesses(context, tries, floor)
        assert self.cache.lengths[: len(tries)] == [len(tokens) - 1 for tokens in context.tokens]
        for tokens, trie in zip(context.tokens, tries, strict=True):
            self.num_guessed += len(trie.tokens) - 1
            node = ROOT
            known = len(tokens) % (self.depth + 1)  # rows don't go at one pace
            for place, token in enumerate(following(self.texts, tokens, known + 1)[1:]):
                node = trie.add_guess(node, token, 0.9 ** (place + 1))

    def move(self, source: int, row: int) -> None:
        self.moves += 1
        super().move(source, row)


class BlockCheck:
    """The cache law for the block's own layers: after every step they hold what a fresh reading of each text gives."""

    def __init__(self, drafter: BlockDrafter, fresh: Fresh) -> None:
        self.drafter, self.fresh = drafter, fresh
        self.num_checks = self.num_moved = 0

    @torch.inference_mode()
    def after(self, rows: Rows, step: Step) -> None:
        heads, held = self.drafter.heads, self.drafter.cache
        for index, row in enumerate(rows.active):
            length = rows.cache.lengths[index]
            assert held.lengths[index] == length
            states_TLH = self.fresh(row, row.tokens[:length])
            context_TH = heads.context(states_TLH.flatten(1))
            close(self.drafter.near_BH[index], context_TH[-1])
            made = heads.keys_and_values(context_TH, torch.arange(length), length)
            for layer, (keys_TGE, values_TGE) in zip(held.layers, made, strict=True):
                close(layer.keys[index, :, :length], keys_TGE.transpose(0, 1))
                close(layer.values[index, :, :length], values_TGE.transpose(0, 1))
            self.num_checks += 1
            self.num_moved += len(step.tokens[index]) > 1


def chain(heads: BlockHeads) -> TokenTree:
    return TokenTree.chain(heads.config.num_heads)
