"""How a forward is launched: eager, or packed (every linear layer in the layout of medusa_cli/packed.py)."""

import ctypes
import platform

from torch import nn

from medusa_cli.packed import PackedLinear

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _LARGEST = -1, -3, 2**31 - 1


def keep_freed_memory() -> None:
    """Let glibc reuse the memory of large tensors instead of handing it back to the system.

    A forward frees and takes the same megabytes hundreds of times; each time the system would clear the pages again,
    which cost half of the time of a forward over many rows. Other C libraries are left as they are.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        libc.mallopt(_M_TRIM_THRESHOLD, _LARGEST)


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
