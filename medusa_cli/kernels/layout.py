"""Which layout a linear layer gets."""

from torch import Tensor

from medusa_cli.kernels.blocks import BlockLinear, Blocks, as_it_is, find_blocks
from medusa_cli.kernels.packed import PackedLinear


def packed_linear(
    weight_OI: Tensor, bias_O: Tensor | None, *, blocks: bool, plain: bool = False, known: Blocks | None = None
) -> PackedLinear:
    """The layer over blocks when these are wanted and the weight can be stored so, else the packed one.

    plain   a weight that can't is read where it lies, where its shape allows
    known   the weight's blocks, where these were found before
    """
    found = known or (find_blocks(weight_OI) if blocks else None)
    if found is None and plain:
        found = as_it_is(weight_OI)
    return PackedLinear(weight_OI, bias_O) if found is None else BlockLinear(weight_OI, bias_O, found)
