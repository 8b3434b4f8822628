"""The stock forward over the nodes of a tree, with masks and positions as the architecture wants to be handed them.

The only file that calls the model's forward. Shape letters: B rows, N nodes, T positions, W wanted nodes, H hidden.
"""

import inspect
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from medusa_cli.contracts import Seen
from medusa_cli.model.cache import Place, TreeCache
from medusa_cli.model.limits import context_limit
from medusa_cli.model.masks import MaskKinds, positions, takes_mapping, tree_masks, wants_each_row
from medusa_cli.model.output_hook import FinalHidden, at_nodes
from medusa_cli.model.taps import LayerInputs, stacked
from medusa_cli.trees.tree import Ancestry


class StockForward:
    """A model's own forward.

    model   a transformers causal LM in eval mode; its linear layers may have been packed
    kinds   layer kind -> window, as `masks.tree_masks` wants them
    """

    def __init__(self, model: Any, kinds: MaskKinds) -> None:
        self.model = model
        self.kinds = kinds
        parameters = inspect.signature(model.forward).parameters
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._takes_mapping = takes_mapping(model)
        self._wants_each_row = wants_each_row(model)
        self._final = FinalHidden(model.get_output_embeddings())
        self.layer_inputs = LayerInputs(model)

    @cached_property
    def device(self) -> torch.device:
        """Where inputs go."""
        return self.model.get_input_embeddings().weight.device

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of weights, masks and hidden states."""
        return self.model.get_input_embeddings().weight.dtype

    @cached_property
    def context_limit(self) -> int | None:
        """The most positions the model has, or None."""
        return context_limit(self.model)

    @property
    def mask_mapping(self) -> list[str] | None:
        """The kinds of layers when this architecture picks its masks out of a mapping, else None."""
        return list(self.kinds) if len(self.kinds) > 1 or self._takes_mapping else None

    @property
    def last_BNH(self) -> Tensor:
        """Final hidden states of all nodes of the last forward, on the device of the last layer."""
        return self._final.last_BNH

    def forget(self) -> None:
        """Hold the last forward's hidden states no longer."""
        self._final.forget()

    def __call__(
        self,
        tokens_BN: Tensor,
        tree: Ancestry,
        place: Place,
        cache: TreeCache,
        wanted_BW: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> Seen:
        """One forward that writes where `place` says; hidden states and logits at the `wanted` nodes, or at all."""
        with self._final.narrowed(wanted_BW), self.layer_inputs.seen(taps) as found:
            out = self.model(
                input_ids=tokens_BN,
                attention_mask=self._masks(tree, place),
                position_ids=self.positions(tree, place),
                use_cache=True,
                **{self.cache_name: cache},
            )
        # where layers lie on several devices, the last hidden states are on another one than the inputs
        hidden_BNH = self.last_BNH.to(self.device)
        taps_BNLH = stacked(found, taps, hidden_BNH, self.device)
        return Seen(hidden_BNH if wanted_BW is None else at_nodes(hidden_BNH, wanted_BW), out.logits, taps_BNLH)

    def plain(self, ids_BT: Tensor) -> Tensor:
        """Final hidden states [B, T, H] without masks, positions or cache of ours; gradients can pass back."""
        first_B1 = torch.zeros(len(ids_BT), 1, dtype=torch.long, device=self.device)  # logits are not asked for
        with self._final.narrowed(first_B1):
            self.model(input_ids=ids_BT.to(self.device), use_cache=False)
        hidden_BTH = self.last_BNH
        self.forget()
        return hidden_BTH

    def positions(self, tree: Ancestry, place: Place) -> Tensor:
        """Nodes past the model's last position get the last one [B, N]: they can never be kept (see Rows.limit)."""
        positions_BN = positions(tree, place).expand(place.columns_BN.shape[0], -1)
        return positions_BN if self.context_limit is None else positions_BN.clamp(max=self.context_limit - 1)

    def _masks(self, tree: Ancestry, place: Place) -> Tensor | dict[str, Tensor]:
        """Models with several kinds of layers take a mapping, the others one tensor."""
        masks = tree_masks(tree, place, self.kinds, self.dtype)
        if self._wants_each_row:
            masks = {kind: mask.expand(len(place.columns_BN), -1, -1, -1) for kind, mask in masks.items()}
        return next(iter(masks.values())) if self.mask_mapping is None else masks
