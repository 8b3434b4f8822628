"""Hidden states of inner layers: seen while a forward runs, by the numbers that transformers gives them.

Number i of `hidden_states` is what goes into layer i (0: the embeddings); the number of layers stands for what the
output matrix sees, which is normed. Other programs count differently: see docs/architecture.md.
Shape letters: B rows, N nodes, L tapped layers, H hidden.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from medusa_cli.errors import TargetError


class LayerInputs:
    """What goes into the layers of a model; nothing is hooked while nobody looks."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @cached_property
    def num_layers(self) -> int:
        """The layers that the config names."""
        count: int = self._model.config.get_text_config().num_hidden_layers
        return count

    def check(self, taps: Sequence[int]) -> None:
        """Raise TargetError for layers that this model doesn't have, or whose states can't be seen in it."""
        strange = [tap for tap in taps if not 0 <= tap <= self.num_layers]
        if strange:
            raise TargetError(
                f"the drafter wants the states of layer {strange[0]}; the model has the numbers 0 to {self.num_layers}",
                "use a drafter that was made for this model",
            )
        inner = [tap for tap in taps if tap < self.num_layers]
        if inner and not self._layers:
            raise TargetError(
                f"the drafter wants states of inner layers, and {type(self._model).__name__} shows none",
                "use a drafter that looks at the last hidden state alone",
            )
        if inner and self.num_layers in taps and self._widths_differ:
            raise TargetError(
                f"what the output of {type(self._model).__name__} sees is not as wide as what its layers see",
                f"the drafter can't look at number {self.num_layers} beside others",
            )

    @property
    def can_be_seen(self) -> range:
        """The numbers of the inner layers whose states can be seen: all, or none."""
        return range(len(self._layers))

    @contextmanager
    def seen(self, taps: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Within, a forward leaves what goes into the wanted layers here; what the output sees is none of them."""
        found: dict[int, Tensor] = {}
        with ExitStack() as stack:
            for tap in taps:
                if tap < self.num_layers:
                    stack.callback(self._watch(tap, found).remove)
            yield found

    def _watch(self, tap: int, found: dict[int, Tensor]) -> Any:
        def before(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            found[tap] = args[0] if args else named["hidden_states"]

        return self._layers[tap].register_forward_pre_hook(before, with_kwargs=True)

    @cached_property
    def _layers(self) -> Sequence[nn.Module]:
        """The layers that write text, in order; none where no list holds as many as the config says."""
        decoder = self._model.get_decoder() or self._model.base_model
        lists = (module for module in decoder.modules() if isinstance(module, nn.ModuleList))
        return next((list(each) for each in lists if len(each) == self.num_layers), [])

    @property
    def _widths_differ(self) -> bool:
        output, config = self._model.get_output_embeddings(), self._model.config.get_text_config()
        return bool(output.in_features != config.hidden_size)


def stacked(found: dict[int, Tensor], taps: Sequence[int], final_BNH: Tensor, device: torch.device) -> Tensor | None:
    """What was seen [B, N, L, H] in the order of the taps, on this device; None where nothing is wanted."""
    if not taps:
        return None
    return torch.stack([found.get(tap, final_BNH).to(device) for tap in taps], dim=2)
