"""(lengths, tree) -> the additive mask each kind of layer needs.

A column holds a committed token when it lies before its row's length, and node m when it lies m columns after.
Shape letters: B rows, N tree nodes, C cache columns.
"""

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from medusa_cli.errors import TargetError
from medusa_cli.model.cache import Place
from medusa_cli.trees.tree import Ancestry

MaskKinds = Mapping[str, int | None]  # layer kind -> window in tokens, None for full attention


def tree_masks(tree: Ancestry, place: Place, kinds: MaskKinds, dtype: torch.dtype) -> dict[str, Tensor]:
    """One additive mask [B or 1, 1, N, C] (0 where a node may look, the dtype's minimum elsewhere) per layer kind.

    Float and additive, because eager attention adds a boolean mask as if it were numbers.
    """
    visible_BNC = _visible(tree, place)
    masks = {}
    for kind, window in kinds.items():
        seen_BNC = visible_BNC if window is None else visible_BNC & _within(tree, place, window)
        mask = torch.zeros(seen_BNC.shape, dtype=dtype, device=seen_BNC.device)
        masks[kind] = mask.masked_fill_(~seen_BNC, torch.finfo(dtype).min)[:, None]
    return masks


def positions(tree: Ancestry, place: Place) -> Tensor:
    """Position of every node [B, N]: its row's length plus its depth."""
    return place.columns_BN[:, :1] + tree.depths_XN


def mask_kinds(model: Any) -> MaskKinds:
    """Layer kind -> window. One kind for most models, two where full and sliding layers alternate.

    Raises TargetError for a window that is no number.
    """
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if window is not None and not isinstance(window, int):
        raise TargetError(
            f"the config says sliding_window is {window!r}, which is no number of tokens", "correct config.json"
        )
    if takes_mapping(model):
        kinds = sorted(set(getattr(config, "layer_types", None) or ["full_attention"]))
        return {kind: window if kind == "sliding_attention" else None for kind in kinds}
    slides = "create_sliding_window_causal_mask" in inspect.getsource(type(_text_stack(model)).forward)
    if slides and window is not None:
        return {"sliding_attention": window}
    return {"full_attention": None}


def takes_mapping(model: Any) -> bool:
    """Whether this architecture picks a mask per layer kind out of a mapping.

    Read off the stock forward, which tests its mask for being a dict exactly when it takes one.
    """
    return "attention_mask, dict)" in inspect.getsource(type(_text_stack(model)).forward)


def _text_stack(model: Any) -> Any:
    """The module that makes the masks: within a model that sees pictures too, the one that writes text."""
    return model.get_decoder() or model.base_model


def wants_each_row(model: Any) -> bool:
    """Whether this architecture refuses one mask for all rows. Read off the stock code, which says so in its error."""
    return "Attention mask should be of size" in inspect.getsource(sys.modules[type(model).__module__])


def _visible(tree: Ancestry, place: Place) -> Tensor:
    """Which columns each node may look at in full attention [B or 1, N, C]."""
    num_nodes = tree.num_nodes
    if place.start is not None:
        ancestors_XNN = tree.ancestors_XNN
        committed = ancestors_XNN.new_ones((*ancestors_XNN.shape[:2], place.start))
        return torch.cat([committed, ancestors_XNN], dim=-1)
    node_BC = _node_of_column(place)
    ancestors_BNN = tree.ancestors_XNN.expand(len(node_BC), -1, -1)
    inside_BC = (node_BC >= 0) & (node_BC < num_nodes)
    index_BNC = node_BC.clamp(0, num_nodes - 1)[:, None].expand(-1, num_nodes, -1)
    return (node_BC < 0)[:, None] | (ancestors_BNN.gather(2, index_BNC) & inside_BC[:, None])


def _within(tree: Ancestry, place: Place, window: int) -> Tensor:
    """Columns whose position is less than `window` before the node's [B, N, C]."""
    node_BC = _node_of_column(place)
    depths_BN = tree.depths_XN.expand(len(node_BC), -1)
    length_B1 = place.columns_BN[:, :1]
    depth_BC = depths_BN.gather(1, node_BC.clamp(0, tree.num_nodes - 1))
    columns_C = torch.arange(place.used, device=node_BC.device)
    position_BC = torch.where(node_BC < 0, columns_C, length_B1 + depth_BC)
    return positions(tree, place)[..., None] - position_BC[:, None] < window


def _node_of_column(place: Place) -> Tensor:
    """Column minus the row's length [B, C]: negative for committed tokens, else the node written there."""
    columns_C = torch.arange(place.used, device=place.columns_BN.device)
    return columns_C - place.columns_BN[:, :1]
