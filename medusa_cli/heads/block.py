"""Block heads: K guesses in one pass of a few layers, which see inner states of the target at every place before.

States of some of the target's layers go through one matrix and a norm, and give each layer of the block keys and
values (DFlash: a drafter that sees the target's own states). The block's queries are the root and K - 1 masks. What a
token brings to the chances of the one after it is a table of low rank (DSpark, arXiv 2607.05147), so that the paths of
a tree cost a look-up and no pass a level. A last vector says how far the guesses of a place agree with the target.

Shape letters: K places, L layers of the block, B blocks, S texts, T places of a text, X taps times their width,
H hidden, Q query heads, G key heads, E head width, R rank, V rows of the target's output matrix, W draft vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medusa_cli.heads.base import Heads, Projection
from medusa_cli.heads.block_attention import Blocks, Rotary
from medusa_cli.heads.block_config import BlockConfig
from medusa_cli.heads.config import HeadsConfig
from medusa_cli.kernels.blocks import nearest_grid
from medusa_cli.kernels.layout import packed_linear
from medusa_cli.kernels.packed import PackedLinear

EMBEDDED = (
    0.02  # size of a number of the root's row in the state: as large, a token would first of all be guessed again
)

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, query [B, K, Q, E], key and value [B, K, G, E]) -> what each place takes from all it sees [B, K, Q * E]"""


@dataclass(frozen=True)
class BlockInputs:
    """What blocks see in training: states_STX of whole texts, where blocks stand, and the ids_BK from the root on."""

    states_STX: Tensor
    blocks: Blocks
    ids_BK: Tensor


@dataclass(frozen=True)
class Roots:
    """The tokens that blocks begin with, where they stand, and the vector of the place before each, for who looks."""

    tokens_B: Tensor
    positions_B: Tensor
    near_BH: Tensor


class BlockHeads(Heads):
    """A block of K places over the target's states.

    fuse_weight [H, X] and context_gain [H] make one vector of a place's states; attention_weight [L, (Q + 2G)E, H],
    merge_weight [L, H, QE], feed_weight [L, 2 inner, H], down_weight [L, H, inner] with attention_gain and feed_gain
    [L, H] are the layers; mask_rows [K - 1, H] the queries after the root, to all of which near_weight [H, H] brings
    the last place's vector, where there is one; out_gain [H] what the output sees.
    output_before_weight [W + 1, R] (the last row: a token outside the draft vocabulary) and output_after_weight [W, R]
    are the table of pairs. confidence_weight [H + R] and confidence_bias [1] judge a place.
    """

    describes = BlockConfig

    def __init__(self, config: BlockConfig, draft_ids_W: Tensor) -> None:
        super().__init__(config, draft_ids_W)
        layers, hidden, width = config.num_layers, config.hidden_size, config.head_size
        queries, keys, inner = config.query_heads * width, config.key_heads * width, config.inner_size
        self.fuse_weight = nn.Parameter(torch.zeros(hidden, config.states_width))
        self.attention_weight = nn.Parameter(torch.zeros(layers, queries + 2 * keys, hidden))
        self.merge_weight = nn.Parameter(torch.zeros(layers, hidden, queries))
        self.feed_weight = nn.Parameter(torch.zeros(layers, 2 * inner, hidden))
        self.down_weight = nn.Parameter(torch.zeros(layers, hidden, inner))
        self.output_before_weight = nn.Parameter(torch.zeros(config.draft_vocab + 1, config.rank))
        self.output_after_weight = nn.Parameter(torch.zeros(config.draft_vocab, config.rank))
        self.confidence_weight = nn.Parameter(torch.zeros(hidden + config.rank))
        self.confidence_bias = nn.Parameter(torch.zeros(1))
        self.near_weight = nn.Parameter(torch.zeros(hidden, hidden)) if config.near else None
        self.mask_rows = nn.Parameter(torch.zeros(config.num_heads - 1, hidden))
        self.context_gain = nn.Parameter(torch.ones(hidden))
        self.attention_gain = nn.Parameter(torch.ones(layers, hidden))
        self.feed_gain = nn.Parameter(torch.ones(layers, hidden))
        self.out_gain = nn.Parameter(torch.ones(hidden))
        self.rotary = Rotary(width, config.rope_theta)
        self._packed: dict[str, list[PackedLinear]] = {}
        self.register_buffer("row_of", None, persistent=False)  # a token's row of output_before_weight [V]

    row_of: Tensor | None

    @classmethod
    def fresh(cls, config: HeadsConfig, draft_ids_W: Tensor, output_VH: Tensor, bias_V: Tensor | None = None) -> Self:
        """Untrained heads: random matrices, always alike; what the first layers write outweighs the tokens' rows."""
        heads = super().fresh(config, draft_ids_W, output_VH, bias_V)
        rng = torch.Generator().manual_seed(0)
        with torch.no_grad():
            sizes = {
                "fuse_weight": 1.0, "attention_weight": 1.0, "merge_weight": 0.5, "feed_weight": 1.0,
                "down_weight": 0.5, "near_weight": EMBEDDED,
            }  # fmt: skip
            for name, size in sizes.items():
                weight = getattr(heads, name)
                if weight is not None:
                    weight.copy_(torch.randn(weight.shape, generator=rng) * size / weight.shape[-1] ** 0.5)
            heads.mask_rows.copy_(torch.randn(heads.mask_rows.shape, generator=rng) * EMBEDDED)
            heads.output_before_weight.copy_(torch.randn(heads.output_before_weight.shape, generator=rng))
        return heads

    def bind(self, output_VH: Tensor, bias_V: Tensor | None = None) -> Self:
        """As of all heads; tokens also get their rows of the table."""
        super().bind(output_VH, bias_V)
        width, ids = len(self.draft_ids), self.draft_ids
        self.row_of = torch.full((self.config.vocab_size,), width, device=ids.device)
        self.row_of[ids] = torch.arange(width, device=ids.device)
        return self

    def start_at(self, hidden_NH: Tensor) -> None:
        """The output's input begins as large as the target's own hidden states are, number by number."""
        with torch.no_grad():
            self.out_gain.copy_(hidden_NH.float().square().mean(0).sqrt().clamp(min=1e-3))

    def pack(self, *, blocks: bool) -> Self:
        """Lay layers and shared output out for the CPU's kernels; for drafting only.

        With blocks, all of it is rounded to 8 bits: it is read at every step, and only guesses.
        """

        def packed(weight_OI: Tensor, bias_O: Tensor | None = None) -> PackedLinear:
            return packed_linear(nearest_grid(weight_OI) if blocks else weight_OI, bias_O, blocks=blocks)

        # a layer's gain is a part of the matrix that reads what it scales
        weights = {
            "attention_weight": self.attention_weight * self.attention_gain[:, None],
            "merge_weight": self.merge_weight,
            "feed_weight": self.feed_weight * self.feed_gain[:, None],
            "down_weight": self.down_weight,
        }
        self._packed = {name: [packed(weight_OI) for weight_OI in weight] for name, weight in weights.items()}
        self._packed |= {"fuse_weight": [packed(self.fuse_weight)], "context": [packed(self._context_weight())]}
        if self.near_weight is not None:
            self._packed["near_weight"] = [packed(self.near_weight)]
        if self.shared_weight is not None:
            self.packed_output = packed(self.shared_weight, self.shared_bias)
        return self

    def projection(self, head: int) -> Projection:
        """The target's rows, and the table of pairs behind them."""
        assert self.shared_weight is not None, "bind(output_weight) comes first"
        return Projection(self.shared_weight, self.shared_bias, self.packed_output, self.output_after_weight)

    def context(self, states: Tensor) -> Tensor:
        """What a place's states [..., X] become for all layers [..., H]."""
        apart = states.unflatten(-1, (-1, self.config.tap_size))
        # each tap to one scale: some layers of some models are a thousand times as large as others
        even = F.rms_norm(apart, apart.shape[-1:]).flatten(-2)
        return self._normed(self._linear("fuse_weight", None, even), self.context_gain)

    def keys_and_values(self, context: Tensor, positions: Tensor, last: int) -> list[tuple[Tensor, Tensor]]:
        """What each layer reads of places [..., T, H]: keys, turned by positions [..., T], and values."""
        config = self.config
        wide = self._packed["context"][0](context) if self._packed else F.linear(context, self._context_weight())
        both = wide.unflatten(-1, (config.num_layers, 2, config.key_heads, config.head_size))
        keys, values = both.unbind(-3)
        turned = self.rotary.of(positions, last, keys.dtype)(keys.flatten(-3, -2)).view_as(keys)
        return list(zip(turned.unbind(-3), values.unbind(-3), strict=True))

    def guess(self, roots: Roots, last: int, attend: Attend) -> Tensor:
        """What the output sees of each place [B, K, H], none of which stands past position `last`."""
        config = self.config
        roots_BH = self._token_rows(roots.tokens_B).to(self.out_gain.dtype) * EMBEDDED
        state = torch.cat([roots_BH[:, None], self.mask_rows.expand(len(roots_BH), -1, -1)], dim=1)
        if self.near_weight is not None:
            state = state + self._linear("near_weight", None, roots.near_BH)[:, None]
        positions_B = roots.positions_B
        positions_BK = positions_B[:, None] + torch.arange(config.num_heads, device=positions_B.device)
        turn = self.rotary.of(positions_BK, last, state.dtype)
        both = config.query_heads + config.key_heads
        for layer in range(config.num_layers):
            normed = self._layer_normed(state, self.attention_gain, layer)
            heads = self._linear("attention_weight", layer, normed).unflatten(-1, (-1, config.head_size))
            query, key = turn(heads[:, :, :both]).split([config.query_heads, config.key_heads], dim=2)
            seen = attend(layer, query, key, heads[:, :, both:])
            state = state + self._linear("merge_weight", layer, seen)
            normed = self._layer_normed(state, self.feed_gain, layer)
            gate, up = self._linear("feed_weight", layer, normed).chunk(2, dim=-1)
            state = state + self._linear("down_weight", layer, F.silu(gate) * up)
        return self._normed(state, self.out_gain)

    def before(self, ids: Tensor) -> Tensor:
        """What tokens [...] bring to the chances of those after them [..., R]."""
        assert self.row_of is not None, "bind(output_weight) comes first"
        return self.output_before_weight[self.row_of[ids]]

    def block_forward(self, inputs: Any) -> Tensor:
        """BlockInputs, blocks of whole texts, each in view of the true tokens, to [B, K, H + R]."""
        states_STX, blocks, ids_BK = inputs.states_STX, inputs.blocks, inputs.ids_BK
        length = states_STX.shape[1]
        positions_T = torch.arange(length, device=states_STX.device)
        context_STH = self.context(states_STX)
        before = self.keys_and_values(context_STH, positions_T, length)
        last = length + self.config.num_heads

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return blocks.attend(query, key, value, before[layer], self.config.causal)

        roots = Roots(ids_BK[:, 0], blocks.place_B + 1, context_STH[blocks.text_B, blocks.place_B])
        guessed_BKH = self.guess(roots, last, attend)
        return torch.cat([guessed_BKH, self.before(ids_BK)], dim=-1)

    def confidence(self, guessed: Tensor) -> Tensor:
        """Log-odds [...] that the guesses of a place agree with the target, from [..., H + R]."""
        odds: Tensor = guessed @ self.confidence_weight + self.confidence_bias
        return odds

    def _context_weight(self) -> Tensor:
        """The layers' matrices for keys and values, below each other [L * 2GE, H]."""
        queries = self.config.query_heads * self.config.head_size
        return self.attention_weight[:, queries:].flatten(0, 1)

    def _layer_normed(self, state: Tensor, gain_LH: Tensor, layer: int) -> Tensor:
        """A block's state as a layer reads it; without the gain where that is in the matrix."""
        if self._packed:
            # fewer and smaller operations than the library's
            return state * (state.shape[-1] ** 0.5 / torch.linalg.vector_norm(state, dim=-1, keepdim=True))
        return self._normed(state, gain_LH[layer])

    def _normed(self, state: Tensor, gain_H: Tensor) -> Tensor:
        return F.rms_norm(state, state.shape[-1:], gain_H)

    def _linear(self, name: str, layer: int | None, inputs: Tensor) -> Tensor:
        """A matrix, as it is laid out."""
        if self._packed:
            laid_out: Tensor = self._packed[name][layer or 0](inputs)
            return laid_out
        weight: Tensor = getattr(self, name)
        return F.linear(inputs, weight if layer is None else weight[layer])


def padded(texts: Sequence[Tensor]) -> Tensor:
    """States of texts [T, X] of different lengths as one tensor [S, T, X], zeros behind each."""
    return nn.utils.rnn.pad_sequence(list(texts), batch_first=True)
