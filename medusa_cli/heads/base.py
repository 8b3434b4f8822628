"""Heads: modules on the target's last hidden state that guess the tokens after next. What all kinds of them share.

A kind says what its heads see (`inputs`) and what they make of it (`block_forward`); the output over the draft
vocabulary, the target's own rows or trained ones, is here. Kinds by name: heads/kinds.py.
Shape letters: K heads, H hidden, I inputs, V rows of the target's output matrix, W draft vocabulary.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medusa_cli.contracts import PathHeads
from medusa_cli.errors import HeadsMismatch
from medusa_cli.heads.config import HeadsConfig
from medusa_cli.kernels.layout import packed_linear
from medusa_cli.kernels.packed import PackedLinear, can_pack


@dataclass(frozen=True)
class Projection:
    """An output layer over the draft vocabulary: logits = hidden @ weight_WH.T + bias_W.

    packed    the same layer laid out for the CPU's kernels, where it is frozen and was packed; these have no gradient
    pairs_WR  a trained matrix for what stands behind the H numbers of a hidden state, R more; None: nothing does
    """

    weight_WH: Tensor
    bias_W: Tensor | None
    packed: PackedLinear | None = None
    pairs_WR: Tensor | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., H], or [..., H + R] with pairs, to logits [..., W]."""
        if self.pairs_WR is not None:
            hidden, more = hidden.split([self.weight_WH.shape[1], self.pairs_WR.shape[1]], dim=-1)
            return self.own_logits(hidden) + F.linear(more, self.pairs_WR)
        return self.own_logits(hidden)

    def own_logits(self, hidden: Tensor) -> Tensor:
        """Without pairs: hidden [..., H] to logits [..., W]."""
        if self.packed is not None:
            laid_out: Tensor = self.packed(hidden)
            return laid_out
        return F.linear(hidden, self.weight_WH, self.bias_W)

    def back(self, grad: Tensor) -> Tensor:
        """The gradient for what came in, from that of the logits [..., W]."""
        own = grad @ self.weight_WH
        return own if self.pairs_WR is None else torch.cat([own, grad @ self.pairs_WR], dim=-1)


class Heads(nn.Module):
    """K heads over a draft vocabulary, whose target ids are draft_ids [W].

    With a shared output, `bind` must be called before `forward`; nothing bound is trained or stored. A kind's own
    parameters start so that an untrained head repeats the target's own guess: `block_forward` gives back the hidden
    state.
    """

    describes: ClassVar[type[HeadsConfig]] = HeadsConfig  # what heads of this class are described by

    config: Any  # of the class above
    draft_ids: Tensor
    shared_weight: Tensor | None
    shared_bias: Tensor | None
    root_rows: Tensor | None

    def __init__(self, config: HeadsConfig, draft_ids_W: Tensor) -> None:
        super().__init__()
        assert draft_ids_W.shape == (config.draft_vocab,), (draft_ids_W.shape, config.draft_vocab)
        self.config = config
        self.output_weight: nn.Parameter | None = None
        self.output_bias: nn.Parameter | None = None
        self.confidence_weight: Any = None  # parameters of kinds that judge their own guesses
        self.confidence_bias: Any = None
        if config.own_output:
            self.output_weight = nn.Parameter(torch.zeros(config.num_heads, config.draft_vocab, config.hidden_size))
            if config.output_bias:
                self.output_bias = nn.Parameter(torch.zeros(config.num_heads, config.draft_vocab))
        self.packed_output: PackedLinear | None = None
        self.register_buffer("draft_ids", draft_ids_W.long())
        self.register_buffer("shared_weight", None, persistent=False)
        self.register_buffer("shared_bias", None, persistent=False)
        self.register_buffer("root_rows", None, persistent=False)

    def by_level(self) -> PathHeads:
        """As heads that are asked level by level."""
        assert self.config.sees_path
        return cast(PathHeads, self)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return next(self.parameters()).dtype

    def inputs(self, hidden: Tensor, path: Tensor) -> Tensor:
        """What the heads see [..., I], from hidden states [..., H] and ids from the root they decided on [..., n]."""
        raise NotImplementedError

    def block_forward(self, inputs: Tensor) -> Tensor:
        """inputs [..., I] to what each head puts through the output: [..., K, H]."""
        raise NotImplementedError

    def pack(self, *, blocks: bool) -> Self:
        """Lay a shared output out for the CPU's kernels, as the target's layers are; for drafting only."""
        if self.shared_weight is not None:
            self.packed_output = packed_linear(self.shared_weight, self.shared_bias, blocks=blocks)
        return self

    @classmethod
    def fresh(cls, config: HeadsConfig, draft_ids_W: Tensor, output_VH: Tensor, bias_V: Tensor | None = None) -> Self:
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

    def bind(self, output_VH: Tensor, bias_V: Tensor | None = None) -> Self:
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
        self.packed_output = None  # laid out from the matrix before
        if not config.own_output:
            self.shared_weight = self._rows(output_VH)
            self.shared_bias = self._rows(bias_V) if config.output_bias and bias_V is not None else None
        return self

    def start_at(self, hidden_NH: Tensor) -> None:
        """Before training: what some of the target's hidden states are like. Most kinds need not know."""

    def pack_output(self) -> Self:
        """Lay a shared output out for the CPU's kernels, for heads that go on learning: it is frozen, and read at
        every step. A copy of it; where kernels have no other layout, nothing.
        """
        if self.shared_weight is not None and can_pack(self.shared_weight.device, self.shared_weight.dtype):
            self.packed_output = PackedLinear(self.shared_weight, self.shared_bias)
        return self

    def _rows(self, table_V: Tensor) -> Tensor:
        """The draft vocabulary's rows of a table; a view, not a copy, when these are simply the first rows."""
        width = len(self.draft_ids)
        first = torch.equal(self.draft_ids, torch.arange(width, device=self.draft_ids.device))
        rows = table_V[:width] if first else table_V[self.draft_ids.to(table_V.device)]
        return rows.detach().to(device=self.device, dtype=self.dtype)

    def _token_rows(self, ids: Tensor) -> Tensor:
        """The output matrix's rows of ids [...], brought to a mean square of 1, the scale of a normed hidden state."""
        assert self.root_rows is not None, "bind(output_weight) comes first"
        rows = self.root_rows[ids]
        return F.rms_norm(rows, rows.shape[-1:])

    def projection(self, head: int) -> Projection:
        """Head `head`'s output layer; the same one for all heads when it is shared."""
        if self.output_weight is not None:
            return Projection(self.output_weight[head], None if self.output_bias is None else self.output_bias[head])
        assert self.shared_weight is not None, "bind(output_weight) comes first"
        return Projection(self.shared_weight, self.shared_bias, self.packed_output)

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs [..., I] to logits [..., K, W] over the draft vocabulary."""
        return self._project(self.block_forward(inputs), None)

    def _project(self, blocks: Tensor, head: int | None) -> Tensor:
        """blocks [..., k, H] of one head, or of all, to logits [..., k, W]."""
        if self.output_weight is None or head is not None:
            return self.projection(head or 0).logits(blocks)
        logits = torch.einsum("...kh,kwh->...kw", blocks, self.output_weight)
        return logits if self.output_bias is None else logits + self.output_bias

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft-vocabulary indices to the target's token ids, same shape."""
        return self.draft_ids[draft_ids]
