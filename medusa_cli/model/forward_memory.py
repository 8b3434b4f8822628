"""Activation memory of a forward: what one takes beside weights and cache, by the shape of its input.

Counted from a model's config, so that it can be asked before there is a model. Shape letters: B rows, N tokens of each,
C cache columns.
"""

from dataclasses import dataclass
from typing import Any

from medusa_cli.model.attention import FOLD_UP_TO, NAME

# tensors of the inner and of the hidden width that are there at once, in bytes of the dtype, for each token
INNER, HIDDEN = 4, 10
# copies of the attention scores that are there at once where attention is eager
SCORES = 5
CPU_BYTES, GPU_BYTES = 128 * 2**20, 2**30  # what a forward over prompts may take
FLAGS = 3  # of who may look at what: the rows of the tree, the columns that are committed, and both together


@dataclass(frozen=True)
class ForwardMemory:
    """Bytes that a forward takes for each token, column and pair of both, in the largest of its layers.

    token    [B, N]: hidden states and what lies between two linear layers
    column   [B, C]: keys and values, repeated for each query head
    mask     [B, N, C]: the masks of all kinds of layers, and what they are made of
    folded   [B, N, C]: the mask again, repeated for each query head of a group
    scores   [B, N, C]: where attention is eager
    logits   one token's, where they are wanted
    folds    whether keys are not repeated for few tokens (model/attention.py)
    budget   what a forward over prompts may take: they are cut until it does
    """

    token: int
    column: int
    mask: int
    folded: int
    scores: int
    logits: int
    folds: bool
    budget: int

    @classmethod
    def of(cls, config: Any, itemsize: int, attention: str, *, kinds: int = 1, on_cpu: bool = True) -> "ForwardMemory":
        """From a text model's config, bytes of a number, the attention by name, and how many kinds of masks it has."""
        heads, hidden = largest_of(config, "num_attention_heads"), largest_of(config, "hidden_size")
        key_heads = largest_of(config, "num_key_value_heads") or heads
        width = largest_of(config, "head_dim") or hidden // heads
        inner = largest_of(config, "intermediate_size") or 4 * hidden
        grouped = key_heads < heads
        return cls(
            token=itemsize * (INNER * inner + HIDDEN * max(hidden, heads * width)),
            column=2 * heads * width * itemsize if grouped else 0,
            mask=kinds * itemsize + FLAGS,
            folded=heads // key_heads * itemsize if grouped else 0,
            scores=SCORES * heads * itemsize if attention == "eager" else 0,
            logits=config.vocab_size * itemsize,
            folds=attention == NAME,
            budget=CPU_BYTES if on_cpu else GPU_BYTES,
        )

    def bytes(self, rows: int, tokens: int, columns: int, wanted: int = 1) -> int:
        """Of one forward over so many tokens in each row, with logits at the `wanted` of them."""
        folded = self.folds and tokens <= FOLD_UP_TO
        pair = self.mask + self.scores + (self.folded if folded else 0)
        repeated = 0 if folded else rows * columns * self.column
        return rows * (tokens * self.token + tokens * columns * pair + wanted * self.logits) + repeated


def largest_of(config: Any, name: str) -> int:
    """The largest number of this name in any layer, for layers may differ; 0 where there is none."""
    layers = [*config.per_layer_config, config] if getattr(config, "is_heterogeneous", False) else [config]
    found = (value for layer in layers for value in _numbers(layer, name))
    return max(found, default=0)


def _numbers(config: Any, name: str) -> list[int]:
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # the library won't say one number for all layers
        return []
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int)]
