"""Products in integers: to the last bit those of a plain loop, for any rows beside a row, any shape, any threads."""

import ctypes
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor
from torch.nn import functional as F

from medusa_cli.kernels.blocks import BLOCK, BlockLinear, find_blocks, functions_of, in_panels
from medusa_cli.kernels.native import library
from medusa_cli.kernels.packed import PackedLinear
from tests.tiny_models import on_grid

SHAPES = [(1, 64), (16, 64), (17, 192), (131, 576), (40, 1536)]  # outputs and inputs of 4 bits
ODD_SHAPES = [(1, 1), (5, 33), (33, 100), (130, 2050)]  # which 8 bits take as well
ROWS = [1, 2, 3, 4, 5, 7, 8, 9, 16, 23, 70]
GRIDS = {4: GGMLQuantizationType.Q4_1, 8: GGMLQuantizationType.Q8_0}


EMULATED = Path(__file__).with_name("emulated.h")
KINDS = {
    "plain": ("-mno-avx2", "-mno-avx", "-mno-fma", "-mno-f16c"),
    "avx-vnni": ("-O0", "-DMEDUSA_VNNI", "-include", str(EMULATED)),
    "avx512-vnni": ("-O0", "-DMEDUSA_AVX512", "-include", str(EMULATED)),
}


def layer_of(weight_OI: Tensor, bias_O: Tensor | None = None) -> BlockLinear:
    """In integers."""
    found = find_blocks(weight_OI)
    packed = PackedLinear(weight_OI, None) if found is None else BlockLinear(weight_OI, None, found)
    return BlockLinear(weight_OI, bias_O, in_panels(packed))


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plainly(x_MI: Tensor, layer: BlockLinear) -> Tensor:
    """The products by a plain loop over the numbers that the layer's dense weight is made of."""
    weight_OI, bits = layer.dense(), layer.blocks.bits
    outputs, inputs = weight_OI.shape
    padded_OGB = F.pad(weight_OI, (0, -inputs % BLOCK)).unflatten(1, (-1, BLOCK))
    if bits == 4:
        offset_OG = padded_OGB.amin(-1)
        step_OG = ((padded_OGB.amax(-1) - offset_OG) / 15).half().float()
        quants_OGB = ((padded_OGB - offset_OG[..., None]) / step_OG[..., None]).nan_to_num(0.0).round()
    else:
        offset_OG, step_OG = None, (padded_OGB.abs().amax(-1) / 127).half().float()
        quants_OGB = (padded_OGB / step_OG[..., None]).nan_to_num(0.0).round()
    quants_OI = quants_OGB.flatten(1)[:, :inputs].int().contiguous()
    found = torch.empty(len(x_MI), outputs)
    source = library(Path(__file__).with_name("plain_int8.cpp"), ("-ffp-contract=off",))
    pointer, whole = ctypes.c_void_p, ctypes.c_long
    source.multiply_plainly.argtypes = [pointer, whole, whole, pointer, pointer, pointer, pointer, whole]
    source.multiply_plainly.restype = None
    source.multiply_plainly(
        x_MI.data_ptr(), len(x_MI), inputs, quants_OI.data_ptr(), step_OG.contiguous().data_ptr(),
        None if offset_OG is None else offset_OG.contiguous().data_ptr(), found.data_ptr(), outputs,
    )  # fmt: skip
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", GRIDS)
def test_every_number_is_the_plain_loop_s_to_the_last_bit(bits: int, shape: tuple[int, int]) -> None:
    layer = layer_of(on_grid(random(*shape, scale=0.05), GRIDS[bits]))
    assert layer.blocks.bits == bits
    x_MI = random(max(ROWS), shape[1], seed=1)
    wanted = plainly(x_MI, layer)
    for rows in ROWS:
        assert torch.equal(layer(x_MI[:rows]), wanted[:rows]), rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(16, 64), (131, 576)])
@pytest.mark.parametrize("bits", GRIDS)
def test_every_kind_of_machine_gives_the_same_bits(bits: int, shape: tuple[int, int], kind: str) -> None:
    """Kinds that this processor lacks run with their instructions written out in others."""
    if "-include" in KINDS[kind] and not Path("/usr/include/simde").exists():
        pytest.skip("SIMDe is not installed: this kind is not tested here")
    layer = layer_of(on_grid(random(*shape, scale=0.05), GRIDS[bits]))
    x_MI = random(23, shape[1], seed=1)
    wanted = plainly(x_MI, layer)
    layer.functions = functions_of(KINDS[kind])
    for rows in (1, 3, 8, 23):
        assert torch.equal(layer(x_MI[:rows]), wanted[:rows]), rows


@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_weights_on_no_grid_are_rounded_to_the_nearest_of_8_bits(shape: tuple[int, int]) -> None:
    weight_OI, x_MI = random(*shape, scale=0.05), random(9, shape[1], seed=1)
    layer = layer_of(weight_OI)
    assert layer.blocks.bits == 8
    step_OG = F.pad(weight_OI, (0, -shape[1] % BLOCK)).unflatten(1, (-1, BLOCK)).abs().amax(-1) / 127
    wrong_OI = (layer.dense() - weight_OI).abs()
    assert torch.all(wrong_OI <= 0.51 * step_OG.repeat_interleave(BLOCK, 1)[:, : shape[1]] + 1e-7)
    for rows in (1, 2, 9):
        assert torch.equal(layer(x_MI[:rows]), plainly(x_MI[:rows], layer))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_no_bit(threads: int) -> None:
    layer, before = layer_of(on_grid(random(131, 576), GRIDS[4])), torch.get_num_threads()
    x_MI = random(70, 576, seed=1)
    wanted = plainly(x_MI, layer)
    try:
        torch.set_num_threads(threads)
        assert torch.equal(layer(x_MI), wanted)
        assert torch.equal(layer(x_MI[:3]), wanted[:3])
    finally:
        torch.set_num_threads(before)


def test_the_largest_sums_overflow_nothing() -> None:
    """Weights and inputs at the ends of their ranges, all of one sign or of the other."""
    for sign in (1.0, -1.0):
        weight_OI = torch.full((16, 64), -0.5)
        weight_OI[:, ::32] = 1.0  # most quants are the least, or the most where the sign is turned
        for weight in (on_grid(sign * weight_OI, GRIDS[4]), on_grid(sign * weight_OI, GRIDS[8])):
            layer, x_MI = layer_of(weight), torch.full((5, 64), 3.0)
            torch.testing.assert_close(layer(x_MI), F.linear(x_MI, layer.dense()), rtol=1e-5, atol=1e-5)
            assert torch.equal(layer(x_MI), plainly(x_MI, layer))


def test_inputs_of_nothing_and_of_the_smallest_numbers_give_numbers() -> None:
    layer = layer_of(on_grid(random(16, 64), GRIDS[4]))
    assert torch.equal(layer(torch.zeros(3, 64)), torch.zeros(3, 16))
    assert torch.isfinite(layer(torch.full((3, 64), 1e-38))).all()
    for odd in (torch.inf, torch.nan):
        x_MI = random(2, 64)
        x_MI[0, 5] = odd
        found = layer(x_MI)
        assert not torch.isfinite(found[0]).any(), "what isn't a number shows"
        assert torch.equal(found[1], layer(x_MI[1:])[0])


def test_the_products_are_nearly_those_of_the_float_weights() -> None:
    weight_OI = on_grid(random(256, 576, scale=0.05), GRIDS[4])
    x_MI, bias_O = random(20, 576, seed=1), random(256, seed=2)
    exact = F.linear(x_MI, weight_OI, bias_O)
    wrong = (layer_of(weight_OI, bias_O)(x_MI) - exact).square().mean().sqrt() / exact.std()
    assert 1e-4 < wrong < 2e-2
