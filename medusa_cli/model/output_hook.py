"""The final hidden states of a model: seen before its output matrix, which works on the wanted nodes alone.

Shape letters: B rows, N nodes, W wanted nodes, H hidden.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


class FinalHidden:
    """A hook before an output matrix.

    Outside of `narrowed` it only looks: the model may be called by others (transformers' generate, in the bench).
    """

    def __init__(self, output: nn.Module) -> None:
        self._wanted_BW: Tensor | None = None
        self._last_BNH: Tensor | None = None
        output.register_forward_pre_hook(self._before_output)

    @contextmanager
    def narrowed(self, wanted_BW: Tensor | None) -> Iterator[None]:
        """Within, logits are those of the wanted nodes, or of all."""
        self._wanted_BW = wanted_BW
        try:
            yield
        finally:
            self._wanted_BW = None

    @property
    def last_BNH(self) -> Tensor:
        """Of all nodes of the last forward, on the device of the last layer."""
        assert self._last_BNH is not None
        return self._last_BNH

    def forget(self) -> None:
        """Hold the last forward's, and what gradients need of it, no longer."""
        self._last_BNH = None

    def _before_output(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self._last_BNH = inputs[0]
        if self._wanted_BW is None:
            return inputs
        return (at_nodes(inputs[0], self._wanted_BW), *inputs[1:])


def at_nodes(hidden_BNH: Tensor, wanted_BW: Tensor) -> Tensor:
    """The hidden states at the wanted nodes [B, W, H]."""
    wanted_BW = wanted_BW.to(hidden_BNH.device)
    return hidden_BNH.gather(1, wanted_BW[..., None].expand(-1, -1, hidden_BNH.shape[-1]))
