"""Medusa heads: small residual modules that guess the tokens after next from the target's last hidden state.

Head k (from 0) sees the hidden state that decided token t+1 and guesses token t+k+2. From "Medusa: Simple LLM
Inference Acceleration Framework with Multiple Decoding Heads" (arXiv 2401.10774), with two changes. The output matrix
may be the target's own, narrowed to a draft vocabulary, because an own one costs as much as a small target. And heads
may see token t+1, the root, which is decided when they guess: a small module can't work out which token won.

Shape letters: K heads, L layers of a head, H hidden, I inputs (H, or 2H with the root), V rows of the target's output
matrix, W draft vocabulary.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from medusa_cli.errors import HeadsMismatch
from medusa_cli.kernels.blocks import nearest_grid
from medusa_cli.kernels.layout import packed_linear
from medusa_cli.kernels.packed import PackedLinear
from medusa_cli.recipe import Settings


class MedusaConfig(Settings):
    """What the heads are and which target they were trained for.

    vocab_size    V: rows of the target's output matrix, padding rows included
    draft_vocab   W: entries of the draft vocabulary; at most V
    own_output    each head has a trained output matrix; otherwise all share the target's rows, which are not stored
    sees_root     the heads also see the root, as its row of the target's output matrix
    output_bias   the output has a bias (some targets' output does)
    """

    type: Literal["medusa"] = "medusa"
    num_heads: int = Field(ge=1, le=1_000)
    num_layers: int = Field(ge=1, le=1_000)
    hidden_size: int = Field(ge=1, le=1_000_000)
    vocab_size: int = Field(ge=1, le=100_000_000)
    draft_vocab: int = Field(ge=1, le=100_000_000)
    own_output: bool
    output_bias: bool
    sees_root: bool = False
    target_name: str
    target_fingerprint: str

    @model_validator(mode="after")
    def _draft_vocab_fits(self) -> "MedusaConfig":
        if self.draft_vocab > self.vocab_size:
            raise ValueError(f"draft_vocab {self.draft_vocab} is larger than the target's vocab_size {self.vocab_size}")
        return self


class HeadsTarget(Protocol):
    """What heads need to know of a target. `output_bias` is only read by heads whose output has one."""

    @property
    def name(self) -> str:
        """What it was asked for by."""

    @property
    def fingerprint(self) -> str:
        """A short hash of the weights' identity."""

    @property
    def hidden_size(self) -> int:
        """H."""

    @property
    def vocab_size(self) -> int:
        """V."""

    @property
    def real_vocab(self) -> int:
        """Ids the tokenizer knows."""

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and hidden states."""

    @property
    def device(self) -> torch.device:
        """Where inputs go."""

    @property
    def output_weight(self) -> Tensor:
        """The output matrix [V, H]."""

    @property
    def output_bias(self) -> Tensor | None:
        """The output's bias [V], or None."""


@dataclass(frozen=True)
class Projection:
    """An output layer over the draft vocabulary: logits = hidden @ weight_WH.T + bias_W."""

    weight_WH: Tensor
    bias_W: Tensor | None


class MedusaHeads(nn.Module):
    """K heads of L residual blocks each, x + SiLU(Linear(x)), run as one batched product.

    weight [L, K, H, H], bias [L, K, H] and, with sees_root, root_weight [K, H, H], which reads the root in the first
    block, start at zero, so that an untrained head repeats the target's own guess.
    draft_ids [W] are the target ids of the draft vocabulary. With a shared output, `bind` must be called before
    `forward`; nothing bound is trained or stored.
    """

    draft_ids: Tensor
    shared_weight: Tensor | None
    shared_bias: Tensor | None
    root_rows: Tensor | None

    def __init__(self, config: MedusaConfig, draft_ids_W: Tensor) -> None:
        super().__init__()
        assert draft_ids_W.shape == (config.draft_vocab,), (draft_ids_W.shape, config.draft_vocab)
        num_layers, num_heads, hidden = config.num_layers, config.num_heads, config.hidden_size
        self.config = config
        self.weight = nn.Parameter(torch.zeros(num_layers, num_heads, hidden, hidden))
        self.bias = nn.Parameter(torch.zeros(num_layers, num_heads, hidden))
        self.root_weight = nn.Parameter(torch.zeros(num_heads, hidden, hidden)) if config.sees_root else None
        self.output_weight: nn.Parameter | None = None
        self.output_bias: nn.Parameter | None = None
        if config.own_output:
            self.output_weight = nn.Parameter(torch.zeros(num_heads, config.draft_vocab, hidden))
            if config.output_bias:
                self.output_bias = nn.Parameter(torch.zeros(num_heads, config.draft_vocab))
        self.packed_output: PackedLinear | None = None
        self.packed_block: PackedLinear | None = None
        self.register_buffer("draft_ids", draft_ids_W.long())
        self.register_buffer("shared_weight", None, persistent=False)
        self.register_buffer("shared_bias", None, persistent=False)
        self.register_buffer("root_rows", None, persistent=False)

    @classmethod
    def fresh(
        cls, config: MedusaConfig, draft_ids_W: Tensor, output_VH: Tensor, bias_V: Tensor | None = None
    ) -> "MedusaHeads":
        """Untrained heads for this target in float32; an own output starts as the target's rows."""
        heads = cls(config, draft_ids_W.to(output_VH.device)).to(output_VH.device)
        heads.bind(output_VH, bias_V)
        if heads.output_weight is not None:
            with torch.no_grad():
                heads.output_weight.copy_(output_VH[heads.draft_ids].expand_as(heads.output_weight))
                if heads.output_bias is not None:
                    assert bias_V is not None
                    heads.output_bias.copy_(bias_V[heads.draft_ids].expand_as(heads.output_bias))
        return heads

    def bind(self, output_VH: Tensor, bias_V: Tensor | None = None) -> "MedusaHeads":
        """Take what the heads need of the target's output matrix: the draft vocabulary's rows, unless the output is
        their own, and the roots' rows, if they see the root.

        Raises HeadsMismatch when the matrix has other rows or columns than the heads were made for.
        """
        config = self.config
        if tuple(output_VH.shape) != (config.vocab_size, config.hidden_size):
            raise HeadsMismatch(
                f"the heads need an output matrix of {config.vocab_size} x {config.hidden_size}, "
                f"this model's is {output_VH.shape[0]} x {output_VH.shape[1]}",
                f"these heads belong to {config.target_name}: load that model, or train heads for this one",
            )
        if config.output_bias and bias_V is None:
            raise HeadsMismatch(
                "the heads need a model whose output has a bias; this one's has none",
                f"these heads belong to {config.target_name}: load that model, or train heads for this one",
            )
        if config.sees_root:
            self.root_rows = output_VH.detach()
        if not config.own_output:
            self.shared_weight = self._rows(output_VH)
            self.shared_bias = self._rows(bias_V) if config.output_bias and bias_V is not None else None
        return self

    def pack(self, *, blocks: bool) -> "MedusaHeads":
        """Lay first blocks and shared output out for the CPU's kernels, as the target's layers are; for drafting only.

        With blocks, the first blocks are rounded to 8 bits: they are read at every step, and only guess.
        """
        weight_OI = self.weight[0].flatten(0, 1)
        if self.root_weight is not None:
            weight_OI = torch.cat([weight_OI, self.root_weight.flatten(0, 1)], dim=1)
        weight_OI = nearest_grid(weight_OI) if blocks else weight_OI
        self.packed_block = packed_linear(weight_OI, self.bias[0].flatten(), blocks=blocks)
        if self.shared_weight is not None:
            self.packed_output = packed_linear(self.shared_weight, self.shared_bias, blocks=blocks)
        return self

    def _rows(self, table_V: Tensor) -> Tensor:
        """The draft vocabulary's rows of a table; a view, not a copy, when these are simply the first rows."""
        width = len(self.draft_ids)
        first = torch.equal(self.draft_ids, torch.arange(width, device=self.draft_ids.device))
        rows = table_V[:width] if first else table_V[self.draft_ids.to(table_V.device)]
        return rows.detach().to(device=self.weight.device, dtype=self.weight.dtype)

    def inputs(self, hidden: Tensor, roots: Tensor) -> Tensor:
        """What the heads see [..., I]: hidden [..., H] and, with sees_root, the rows of the roots' ids [...].

        Rows are brought to a mean square of 1, the scale of a normed hidden state.
        """
        if self.root_weight is None:
            return hidden
        assert self.root_rows is not None, "bind(output_weight) comes first"
        rows = self.root_rows[roots].to(hidden.dtype)
        return torch.cat([hidden, F.rms_norm(rows, rows.shape[-1:])], dim=-1)

    def block_forward(self, inputs: Tensor) -> Tensor:
        """inputs [..., I] through every head's blocks: [..., K, H]."""
        num_layers, num_heads, size = self.bias.shape
        hidden = inputs[..., :size]
        # The first layer's input is the same for all heads: one wide product instead of K narrow ones.
        if self.packed_block is not None:
            wide = self.packed_block(inputs)
        else:
            wide = F.linear(hidden, self.weight[0].view(num_heads * size, size), self.bias[0].view(-1))
            if self.root_weight is not None:
                wide = wide + F.linear(inputs[..., size:], self.root_weight.view(num_heads * size, size))
        blocks = hidden.unsqueeze(-2) + F.silu(wide.unflatten(-1, (num_heads, size)))
        for layer in range(1, num_layers):
            inner = torch.einsum("...kh,kgh->...kg", blocks, self.weight[layer]) + self.bias[layer]
            blocks = blocks + F.silu(inner)
        return blocks

    def projection(self, head: int) -> Projection:
        """Head `head`'s output layer; the same one for all heads when it is shared."""
        if self.output_weight is not None:
            return Projection(self.output_weight[head], None if self.output_bias is None else self.output_bias[head])
        assert self.shared_weight is not None, "bind(output_weight) comes first"
        return Projection(self.shared_weight, self.shared_bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs [..., I] to logits [..., K, W] over the draft vocabulary."""
        blocks = self.block_forward(inputs)
        if self.packed_output is not None:
            packed: Tensor = self.packed_output(blocks)
            return packed
        if self.output_weight is None:
            shared = self.projection(0)
            return F.linear(blocks, shared.weight_WH, shared.bias_W)
        logits = torch.einsum("...kh,kwh->...kw", blocks, self.output_weight)
        return logits if self.output_bias is None else logits + self.output_bias

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft-vocabulary indices to the target's token ids, same shape."""
        return self.draft_ids[draft_ids]


def check_belongs(config: MedusaConfig, target: HeadsTarget) -> None:
    """Raise HeadsMismatch, saying what differs, unless heads of this config were trained for this target."""
    hint = f"these heads belong to {config.target_name}: load that model, or train heads for this one"
    for what, ours, theirs in (
        ("a hidden size of", config.hidden_size, target.hidden_size),
        ("a vocabulary of", config.vocab_size, target.vocab_size),
        ("weights with the fingerprint", config.target_fingerprint, target.fingerprint),
    ):
        if ours != theirs:
            raise HeadsMismatch(f"the heads need {what} {ours}; {target.name} has {theirs}", hint)
