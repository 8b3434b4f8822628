"""Which layout a linear layer gets."""

from torch import Tensor

from medusa_cli.kernels.blocks import BlockLinear, find_blocks
from medusa_cli.kernels.packed import PackedLinear


def packed_linear(weight_OI: Tensor, bias_O: Tensor | None, *, blocks: bool) -> PackedLinear:
    """The layer over blocks when these are wanted and the weight lies on a grid, else the packed one."""
    found = find_blocks(weight_OI) if blocks else None
    return PackedLinear(weight_OI, bias_O) if found is None else BlockLinear(weight_OI, bias_O, found)
