"""Grouped attention: query heads that share a key head are folded into the query length.

The library repeats keys and values for every query head when it is given a mask, which for many rows moves more
memory than the weights. Folding gives the same numbers and repeats only the small mask. Registered through the
library's own attention interface; the modelling code stays stock.
Shape letters: B rows, N query tokens, C columns, E head width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "medusa_grouped"
FOLD_UP_TO = 128  # beyond this many query tokens the repeated mask outweighs the repeated keys


def register() -> str:
    """Make the implementation known to the library; returns the name to load a model with."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, grouped_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
    return NAME


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of query [B, heads, N, E] over key and value [B, key heads, C, E]; returns [B, N, heads, E].

    Keys that come with their layer of the cache are the new ones alone: the layer attends to the others as well.
    """
    layer = getattr(key, "tree_layer", None)
    # a model that works a mask of its own into ours (doge) is none for the kernel, which knows the tree alone
    if layer is not None and (attention_mask is None or attention_mask.shape[1] == 1):
        return layer.attend(query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling), None
    num_rows, num_heads, num_tokens, width = query.shape
    key_heads = key.shape[1]
    if attention_mask is None or key_heads == num_heads or attention_mask.shape[1] != 1 or num_tokens > FOLD_UP_TO:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    groups = num_heads // key_heads
    folded = query.reshape(num_rows, key_heads, groups * num_tokens, width)
    mask = attention_mask.repeat(1, 1, groups, 1) if num_tokens > 1 else attention_mask
    out = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return out.view(num_rows, num_heads, num_tokens, -1).transpose(1, 2).contiguous(), None
