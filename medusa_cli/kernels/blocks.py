"""Linear layers whose weights are read as they are stored: on a grid of 4 or 8 bits, in bfloat16, or in float32.

A decoding step reads every weight once for a few rows: fewer bytes are less time. How a weight is stored is found in
its numbers, whatever file or architecture they come from, and only taken when it gives back every weight to the last
bit; the products are those of the float weights. Shape letters: O outputs, I inputs.
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
RUN = 64  # inputs whose weights stand together
LANES = 8
IN_INTEGERS = 80  # as in blocks.cpp
FEW_ROWS = 24  # beyond these weights are opened once for all rows


@dataclass(frozen=True)
class Blocks:
    """A weight [O, I] laid out as blocks.cpp reads it.

    bits          4 or 8 (a grid), 16 (bfloat16) or 32 (float32, the weight itself)
    stored        bytes, or [O, I] in bfloat16 or float32
    in_integers   4 or 8 bits in panels, whose products are worked out in integers
    """

    bits: int
    stored: Tensor
    in_integers: bool = False

    @property
    def code(self) -> int:
        """How the compiled functions are told."""
        return self.bits + (IN_INTEGERS if self.in_integers else 0)


@functools.cache
def functions() -> ctypes.CDLL:
    """The functions of blocks.cpp. Raises CannotCompile where there is no compiler."""
    return functions_of(())


def functions_of(flags: tuple[str, ...]) -> ctypes.CDLL:
    """The same compiled with more flags, as for another kind of machine."""
    found = library(Path(__file__).with_name("blocks.cpp"), flags)
    pointer, whole, number = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
    found.multiply.argtypes = [number, pointer, whole, whole, pointer, pointer, whole, whole, number]
    found.multiply.restype = None
    found.stored_bytes.argtypes = [number, whole, whole]
    found.stored_bytes.restype = whole
    found.find_blocks.argtypes = [number, pointer, whole, whole, pointer, number]
    found.open_blocks.argtypes = [number, pointer, whole, whole, pointer]
    found.open_blocks.restype = None
    found.bytes_in_panels.argtypes = [number, whole, whole]
    found.bytes_in_panels.restype = whole
    found.lay_panels_of_four.argtypes = [pointer, whole, whole, pointer, number]
    found.lay_panels_of_eight.argtypes = [pointer, whole, whole, pointer, number]
    found.lay_panels_of_eight.restype = None
    found.open_panels.argtypes = [number, pointer, whole, whole, pointer]
    found.open_panels.restype = None
    return found


class BlockLinear(PackedLinear):
    """A layer that reads blocks; no gradient, not even for the inputs, comes from it."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, blocks: Blocks) -> None:
        super().__init__(weight_OI, bias_O, pack=False)
        self.blocks = blocks
        self.functions = functions()

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        # the kernel reads what a pointer points to: numbers of another kind or width lie past the end
        assert inputs.dtype == torch.float32, inputs.dtype
        assert inputs.shape[-1] == self.in_features, inputs.shape
        inputs = inputs.contiguous()
        outputs = inputs.new_empty(*inputs.shape[:-1], self.out_features)
        self.functions.multiply(
            self.blocks.code,
            inputs.data_ptr(),
            inputs.numel() // self.in_features,
            self.in_features,
            self.blocks.stored.data_ptr(),
            outputs.data_ptr(),
            self.out_features,
            FEW_ROWS,
            torch.get_num_threads(),
        )
        return outputs if self.bias is None else outputs.add_(self.bias)

    def dense(self) -> Tensor:
        """The weight [O, I]; a copy where it is stored in fewer bits, unless it is tied to the embeddings."""
        if self.tied_to is not None:
            return self.tied_to.detach()
        if self.blocks.bits > 8:
            return self.blocks.stored.float()
        weight_OI = torch.empty(self.out_features, self.in_features)
        opened = self.functions.open_panels if self.blocks.in_integers else self.functions.open_blocks
        opened(
            self.blocks.bits,
            self.blocks.stored.data_ptr(),
            self.out_features,
            self.in_features,
            weight_OI.data_ptr(),
        )
        return weight_OI


def find_blocks(weight_OI: Tensor) -> Blocks | None:
    """A weight on the CPU in 4, 8 or 16 bits, or None where these don't give it back. Raises CannotCompile."""
    if weight_OI.dtype != torch.float32 or weight_OI.shape[1] % LANES:
        return None
    weight_OI = weight_OI.detach().contiguous()
    return _on_grid(weight_OI, 4) or _on_grid(weight_OI, 8) or _in_bfloat16(weight_OI)


def as_it_is(weight_OI: Tensor) -> Blocks | None:
    """A float32 weight on the CPU, read where it lies; None where its rows don't fill the kernel's lanes."""
    if weight_OI.dtype != torch.float32 or weight_OI.shape[1] % LANES:
        return None
    return Blocks(32, weight_OI.detach().contiguous())


def in_panels(layer: PackedLinear) -> Blocks:
    """A layer's weight for products in integers: in 4 bits where it lies on such a grid, else the nearest in 8.

    Inputs are rounded to 8 bits, 32 of a row with one scale; a block's sum is an integer, and is added to the output
    times scale and step in the order of the blocks (kernels/int8.h). Raises CannotCompile.
    """
    shape, threads = (layer.out_features, layer.in_features), torch.get_num_threads()
    if isinstance(layer, BlockLinear) and layer.blocks.bits == 4 and not layer.blocks.in_integers:
        panels = _no_panels(4, *shape)
        if functions().lay_panels_of_four(layer.blocks.stored.data_ptr(), *shape, panels.data_ptr(), threads):
            return Blocks(4, panels, in_integers=True)
    weight_OI, panels = layer.dense().float().contiguous(), _no_panels(8, *shape)
    functions().lay_panels_of_eight(weight_OI.data_ptr(), *shape, panels.data_ptr(), threads)
    return Blocks(8, panels, in_integers=True)


def in_integers(layer: PackedLinear) -> BlockLinear:
    """The layer with products in integers. Raises CannotCompile."""
    made = BlockLinear(torch.empty(layer.out_features, layer.in_features, device="meta"), layer.bias, in_panels(layer))
    made.tied_to = layer.tied_to
    return made


def _no_panels(bits: int, num_outputs: int, num_inputs: int) -> Tensor:
    return torch.zeros(functions().bytes_in_panels(bits, num_outputs, num_inputs), dtype=torch.uint8)


def nearest_grid(weight_OI: Tensor) -> Tensor:
    """The nearest weight on a grid of 8 bits, for layers whose numbers may change a little; as it is where none fits.

    Each block's step is a float16, 127 of which reach its farthest weight (the rule of Q8_0).
    """
    if weight_OI.shape[1] % RUN:
        return weight_OI
    blocks_OGB = weight_OI.detach().unflatten(1, (-1, BLOCK))
    step_OG1 = (blocks_OGB.abs().amax(-1, keepdim=True) / 127).half().to(weight_OI.dtype)
    quants_OGB = (blocks_OGB / step_OG1).nan_to_num(0.0).round().clamp(-127, 127)
    return (quants_OGB * step_OG1).flatten(1)


def _on_grid(weight_OI: Tensor, bits: int) -> Blocks | None:
    """As blocks of so many bits, or None."""
    num_outputs, num_inputs = weight_OI.shape
    if num_inputs % RUN:
        return None
    stored = torch.zeros(functions().stored_bytes(bits, num_outputs, num_inputs), dtype=torch.uint8)
    found = functions().find_blocks(
        bits, weight_OI.data_ptr(), num_outputs, num_inputs, stored.data_ptr(), torch.get_num_threads()
    )
    return Blocks(bits, stored) if found else None


def _in_bfloat16(weight_OI: Tensor) -> Blocks | None:
    """As bfloat16 when that is what the weights were made from, as those of most models are."""
    stored = weight_OI.bfloat16()
    return Blocks(16, stored) if torch.equal(stored.float(), weight_OI) else None
