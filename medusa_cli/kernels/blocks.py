"""Linear layers over weights that lie on a grid of 4 or 8 bits, as those of quantised files do.

A decoding step reads every weight once for a few rows: fewer bytes are less time. The blocks are found in the numbers
themselves, whatever file or architecture they come from, and only taken when they give back every weight to the last
bit; the products are those of the float weights. Shape letters: O outputs, I inputs, G blocks of an output.
"""

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from medusa_cli.kernels.native import library
from medusa_cli.kernels.packed import PackedLinear

BLOCK = 32  # weights that share a step and an offset, in every simple GGUF format
FEW_ROWS = 24  # beyond these the packed layer is faster (docs/log.md)


@dataclass(frozen=True)
class Blocks:
    """A weight [O, I] as quants on a grid, laid out as blocks.cpp reads them.

    bits       4, or 8
    quants     int32 [O, I * bits / 32]
    grid       float32: step and offset [O, G, 2] for 4 bits, step [O, G] for 8
    """

    bits: int
    quants: Tensor
    grid: Tensor


@functools.cache
def functions() -> ctypes.CDLL:
    """The functions of blocks.cpp. Raises CannotCompile where there is no compiler."""
    found = library(Path(__file__).with_name("blocks.cpp"))
    pointer, whole, number = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
    for multiply in (found.multiply_4, found.multiply_8):
        multiply.argtypes = [pointer, whole, whole, pointer, pointer, pointer, whole, number]
        multiply.restype = None
    found.find_blocks.argtypes = [number, pointer, whole, whole, pointer, pointer, number]
    return found


class BlockLinear(PackedLinear):
    """A packed layer that reads blocks where it has few rows; no gradient, not even for the inputs, comes from it."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, blocks: Blocks) -> None:
        super().__init__(weight_OI, bias_O)
        self.blocks = blocks
        self.multiply = functions().multiply_4 if blocks.bits == 4 else functions().multiply_8

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        # the kernel reads what a pointer points to: numbers of another kind or width lie past the end
        assert inputs.dtype == torch.float32, inputs.dtype
        assert inputs.shape[-1] == self.in_features, inputs.shape
        num_rows = inputs.numel() // self.in_features
        if num_rows > FEW_ROWS:
            return super().forward(inputs)
        inputs = inputs.contiguous()
        outputs = inputs.new_empty(*inputs.shape[:-1], self.out_features)
        self.multiply(
            inputs.data_ptr(),
            num_rows,
            self.in_features,
            self.blocks.quants.data_ptr(),
            self.blocks.grid.data_ptr(),
            outputs.data_ptr(),
            self.out_features,
            torch.get_num_threads(),
        )
        return outputs if self.bias is None else outputs.add_(self.bias)


def find_blocks(weight_OI: Tensor) -> Blocks | None:
    """A weight on the CPU as blocks, or None where it isn't on a grid. Raises CannotCompile."""
    if weight_OI.dtype != torch.float32 or weight_OI.shape[1] % (2 * BLOCK):
        return None
    weight_OI = weight_OI.detach().contiguous()
    return _find(weight_OI, 4) or _find(weight_OI, 8)


def nearest_grid(weight_OI: Tensor) -> Tensor:
    """The nearest weight on a grid of 8 bits, for layers whose numbers may change a little; as it is where none fits.

    Each block's step is a float16, 127 of which reach its farthest weight (the rule of Q8_0).
    """
    if weight_OI.shape[1] % (2 * BLOCK):
        return weight_OI
    blocks_OGB = weight_OI.detach().unflatten(1, (-1, BLOCK))
    step_OG1 = (blocks_OGB.abs().amax(-1, keepdim=True) / 127).half().to(weight_OI.dtype)
    quants_OGB = (blocks_OGB / step_OG1).nan_to_num(0.0).round().clamp(-127, 127)
    return (quants_OGB * step_OG1).flatten(1)


def _find(weight_OI: Tensor, bits: int) -> Blocks | None:
    """As blocks of so many bits, or None."""
    num_outputs, num_inputs = weight_OI.shape
    num_blocks = num_inputs // BLOCK
    quants = torch.zeros(num_outputs, num_inputs * bits // 32, dtype=torch.int32)
    grid = torch.empty((num_outputs, num_blocks, 2) if bits == 4 else (num_outputs, num_blocks))
    found = functions().find_blocks(
        bits,
        weight_OI.data_ptr(),
        num_outputs,
        num_inputs,
        quants.data_ptr(),
        grid.data_ptr(),
        torch.get_num_threads(),
    )
    return Blocks(bits, quants, grid) if found else None
