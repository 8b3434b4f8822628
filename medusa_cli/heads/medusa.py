"""Medusa heads: small residual modules that guess the tokens after next from the target's last hidden state.

Head k (from 0) sees the hidden state that decided token t+1 and guesses token t+k+2. From "Medusa: Simple LLM
Inference Acceleration Framework with Multiple Decoding Heads" (arXiv 2401.10774), with two changes. The output matrix
may be the target's own, narrowed to a draft vocabulary, because an own one costs as much as a small target. And heads
may see token t+1, the root, which is decided when they guess: a small module can't work out which token won.

Hydra heads (arXiv 2402.05109) go on from there: head k also sees the guesses before its own on its path, so what it
guesses after one token is not what it guesses after another.

Shape letters: K heads, L layers of a head, H hidden, I inputs (H, 2H with the root, (1 + K)H with the path), P pairs
of a head and a guess it sees, V rows of the target's output matrix, W draft vocabulary.
"""

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medusa_cli.heads.base import Heads
from medusa_cli.heads.config import HydraConfig, MedusaConfig
from medusa_cli.kernels.blocks import nearest_grid
from medusa_cli.kernels.layout import packed_linear
from medusa_cli.kernels.packed import PackedLinear


class MedusaHeads(Heads):
    """K heads of L residual blocks each, x + SiLU(Linear(x)), run as one batched product.

    weight [L, K, H, H], bias [L, K, H] and, with sees_root, root_weight [K, H, H], which reads the root in the first
    block, start at zero, so that an untrained head repeats the target's own guess. So does path_weight [P, H, H] of
    hydra heads, through which head k reads guess j (from 1) of its path: pair k (k - 1) / 2 + j - 1.
    """

    describes = MedusaConfig

    def __init__(self, config: MedusaConfig, draft_ids_W: Tensor) -> None:
        super().__init__(config, draft_ids_W)
        num_layers, num_heads, hidden = config.num_layers, config.num_heads, config.hidden_size
        self.weight = nn.Parameter(torch.zeros(num_layers, num_heads, hidden, hidden))
        self.bias = nn.Parameter(torch.zeros(num_layers, num_heads, hidden))
        self.root_weight = nn.Parameter(torch.zeros(num_heads, hidden, hidden)) if config.sees_root else None
        self.path_weight = nn.Parameter(torch.zeros(config.num_pairs, hidden, hidden)) if config.num_pairs else None
        self.packed_block: PackedLinear | None = None
        self.packed_later: list[list[PackedLinear]] = []  # layer by layer after the first, a matrix for each head
        self.packed_path: list[PackedLinear] = []  # for each guess of a path, the matrices of all heads that see it

    def pack(self, *, blocks: bool) -> Self:
        """Lay blocks and shared output out for the CPU's kernels, as the target's layers are; for drafting only.

        With blocks, the heads' own weights are rounded to 8 bits: they are read at every step, and only guess.
        """

        def packed(weight_OI: Tensor, bias_O: Tensor | None) -> PackedLinear:
            return packed_linear(nearest_grid(weight_OI) if blocks else weight_OI, bias_O, blocks=blocks)

        first_OI = self.weight[0].flatten(0, 1)
        if self.root_weight is not None:
            first_OI = torch.cat([first_OI, self.root_weight.flatten(0, 1)], dim=1)
        self.packed_block = packed(first_OI, self.bias[0].flatten())
        self.packed_later = [
            [packed(weight_HH, bias_H) for weight_HH, bias_H in zip(*layer, strict=True)]
            for layer in zip(self.weight[1:], self.bias[1:], strict=True)
        ]
        self.packed_path = [packed(self._seeing(guess), None) for guess in self._guesses_seen()]
        super().pack(blocks=blocks)
        return self

    def inputs(self, hidden: Tensor, path: Tensor) -> Tensor:
        """What the heads see [..., I]: hidden [..., H] and, as far as they see them, the rows of path's ids [..., n].

        path   the root and, for hydra heads, the K - 1 guesses after it; others look at the root only
        """
        if self.root_weight is None:
            return hidden
        seen = path if self.path_weight is not None else path[..., :1]
        return torch.cat([hidden, self._token_rows(seen).to(hidden.dtype).flatten(-2)], dim=-1)

    def block_forward(self, inputs: Tensor) -> Tensor:
        """inputs [..., I] through every head's blocks: [..., K, H]."""
        size = self.config.hidden_size
        hidden, wide = inputs[..., :size], self.first_sums(inputs)
        if self.path_weight is not None:
            rows = inputs[..., 2 * size :].unflatten(-1, (-1, size))
            terms = [self.path_sums(rows[..., guess - 1, :], guess) for guess in self._guesses_seen()]
            wide = wide + sum(F.pad(term, (0, 0, guess, 0)) for guess, term in enumerate(terms, start=1))
        return self._later_layers(hidden.unsqueeze(-2) + F.silu(wide))

    def first_sums(self, inputs: Tensor) -> Tensor:
        """What hidden state and root bring to every head's first block [..., K, H]; inputs past them are not read."""
        num_heads, size = self.bias.shape[1:]
        if self.packed_block is not None:
            wide: Tensor = self.packed_block(inputs[..., : self.packed_block.in_features])
        else:
            # All heads read the same: one wide product instead of K narrow ones.
            wide = F.linear(inputs[..., :size], self.weight[0].view(num_heads * size, size), self.bias[0].view(-1))
            if self.root_weight is not None:
                roots = inputs[..., size : 2 * size]
                wide = wide + F.linear(roots, self.root_weight.view(num_heads * size, size))
        return wide.unflatten(-1, (num_heads, size))

    def path_sums(self, rows: Tensor, guess: int) -> Tensor:
        """What guess number `guess` (from 1) of a path brings to the first blocks of the heads that see it.

        rows [..., H] to [..., K - guess, H]: heads number `guess` (from 0) and those after it.
        """
        wide = self.packed_path[guess - 1](rows) if self.packed_path else F.linear(rows, self._seeing(guess))
        return wide.unflatten(-1, (-1, self.config.hidden_size))

    def guess_rows(self, ids: Tensor) -> Tensor:
        """The rows that `path_sums` reads of guesses [...], in the heads' dtype [..., H]."""
        return self._token_rows(ids).to(self.weight.dtype)

    def head_logits(self, hidden: Tensor, sums: Tensor, head: int) -> Tensor:
        """Draft logits [..., W] of one head, from hidden [..., H] and the sums of its first block [..., H]."""
        block = (hidden + F.silu(sums)).unsqueeze(-2)
        return self._project(self._later_layers(block, slice(head, head + 1)), head).squeeze(-2)

    def _guesses_seen(self) -> range:
        """The guesses of a path that any head sees, counted from 1."""
        return range(1, self.config.num_heads if self.path_weight is not None else 1)

    def _seeing(self, guess: int) -> Tensor:
        """The matrices [(K - guess) * H, H] of the heads that see this guess."""
        assert self.path_weight is not None
        pairs = [head * (head - 1) // 2 + guess - 1 for head in range(guess, self.config.num_heads)]
        return self.path_weight[pairs].flatten(0, 1)

    def _later_layers(self, blocks: Tensor, heads: slice = slice(None)) -> Tensor:
        """The layers after the first, for these heads: blocks [..., k, H] of them, same shape."""
        for layer in range(1, self.config.num_layers):
            if self.packed_later:
                pairs = zip(self.packed_later[layer - 1][heads], blocks.unbind(-2), strict=True)
                inner = torch.stack([packed(block) for packed, block in pairs], dim=-2)
            else:
                weight_kHH, bias_kH = self.weight[layer, heads], self.bias[layer, heads]
                inner = torch.einsum("...kh,kgh->...kg", blocks, weight_kHH) + bias_kH
            blocks = blocks + F.silu(inner)
        return blocks


class HydraHeads(MedusaHeads):
    """Heads that also see the guesses before theirs."""

    describes = HydraConfig
