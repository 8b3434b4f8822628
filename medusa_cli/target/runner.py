"""How a forward is launched: eager, or packed (weights laid out for the CPU's matrix kernels).

Packing replaces every linear layer by one that holds the same numbers in oneDNN's blocked layout. The layout is
chosen for 64 rows: it serves one row as well as the plain one does, and several rows far better.
"""

import ctypes
import platform

import torch
from torch import Tensor, nn

PACKED_FOR = 64
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _LARGEST = -1, -3, 2**31 - 1


class PackedLinear(nn.Module):
    """A frozen linear layer over a weight in oneDNN's layout; CPU only, no gradient for the weight."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_OI.shape
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach().contiguous(), PACKED_FOR)
        self.bias = None if bias_O is None else bias_O.detach()
        self.tied_to: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        return torch.ops.mkldnn._linear_pointwise(inputs, self.packed, self.bias, "none", [], "")


def keep_freed_memory() -> None:
    """Let glibc reuse the memory of large tensors instead of handing it back to the system.

    A forward frees and takes the same megabytes hundreds of times; each time the system would clear the pages again,
    which cost half of the time of a forward over many rows. Other C libraries are left as they are.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        libc.mallopt(_M_TRIM_THRESHOLD, _LARGEST)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packing runs here, and pays."""
    return device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available()


def pack(model: nn.Module) -> nn.Module:
    """Replace the model's linear layers by packed ones, in place; embeddings keep their own weight."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                packed = PackedLinear(child.weight, child.bias)
                packed.tied_to = child.weight if child.weight in embeddings else None
                setattr(parent, name, packed)
    return model
