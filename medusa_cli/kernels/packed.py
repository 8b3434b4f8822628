"""Linear layers over float weights laid out for the CPU's matrix kernels.

oneDNN's blocked layout, chosen for 64 rows, serves one row as well as the plain layout does, and several rows far
better (docs/log.md has the measurements).
"""

import torch
from torch import Tensor, nn

PACKED_FOR = 64


class PackedLinear(nn.Module):
    """A frozen linear layer over a weight in oneDNN's layout; CPU only, no gradient for the weight.

    pack   False for layers that bring their own way to hold the weight
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, *, pack: bool = True) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_OI.shape
        self.packed: Tensor | None = None
        if pack:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach().contiguous(), PACKED_FOR)
        self.bias = None if bias_O is None else bias_O.detach()
        self.tied_to: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        return torch.ops.mkldnn._linear_pointwise(inputs, self.packed, self.bias, "none", [], "")

    def dense(self) -> Tensor:
        """The weight [O, I]; the embeddings' own where it is tied to these, since a packed one would be a copy."""
        if self.tied_to is not None:
            return self.tied_to.detach()
        assert self.packed is not None
        return self.packed.to_dense()


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packing runs here, and pays."""
    return device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available()
