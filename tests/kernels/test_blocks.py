"""Weights on a grid are found, give back every weight to the last bit, and multiply as the plain layer does."""

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import nn
from torch.nn import functional as F

from medusa_cli.kernels.blocks import FEW_ROWS, BlockLinear, find_blocks, nearest_grid
from medusa_cli.kernels.layout import packed_linear
from medusa_cli.kernels.packed import PackedLinear
from tests.tiny_models import on_grid

KINDS = {
    GGMLQuantizationType.Q4_0: 4,
    GGMLQuantizationType.Q4_1: 4,
    GGMLQuantizationType.Q8_0: 8,
}
SHAPES = [(48, 64), (5, 128), (1, 192), (131, 576)]


def weight_of(kind: GGMLQuantizationType, shape: tuple[int, int] = (48, 128), scale: float = 0.05) -> torch.Tensor:
    rng = torch.Generator().manual_seed(5)
    return on_grid(scale * torch.randn(shape, generator=rng), kind)


@pytest.mark.parametrize("scale", [1e-7, 1e-3, 1.0, 300.0])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_quantised_file_holds_comes_back_to_the_last_bit(
    kind: GGMLQuantizationType, shape: tuple[int, int], scale: float
) -> None:
    weight_OI = weight_of(kind, shape, scale)
    layer = packed_linear(weight_OI, None, blocks=True)
    assert isinstance(layer, BlockLinear)
    if weight_OI.abs().max() > 0 and scale > 1e-6:  # so small that every number is a whole step, 8 bits hold 4 too
        assert layer.blocks.bits == KINDS[kind]
    columns = [layer(unit[None])[0] for unit in torch.eye(shape[1])]
    assert torch.equal(torch.stack(columns, dim=1), weight_OI)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_rows_gives_the_plain_layer_s_numbers(kind: GGMLQuantizationType, bias: bool) -> None:
    weight_OI, bias_O = weight_of(kind), torch.randn(48) if bias else None
    layer = packed_linear(weight_OI, bias_O, blocks=True)
    inputs = torch.randn(FEW_ROWS + 2, 128)
    for num_rows in range(1, FEW_ROWS + 3):
        found = layer(inputs[:num_rows])
        torch.testing.assert_close(found, F.linear(inputs[:num_rows], weight_OI, bias_O), atol=2e-6, rtol=1e-5)


def test_a_row_s_numbers_do_not_depend_on_the_rows_beside_it() -> None:
    layer = packed_linear(weight_of(GGMLQuantizationType.Q4_1), None, blocks=True)
    inputs = torch.randn(FEW_ROWS, 128)
    alone = torch.cat([layer(row[None]) for row in inputs])
    for num_rows in range(1, FEW_ROWS + 1):
        assert torch.equal(layer(inputs[:num_rows]), alone[:num_rows])


@pytest.mark.parametrize("bits", [4, 8, 16, 32])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 64), (15, 128), (16, 256), (37, 320), (70, 832)])
def test_many_rows_give_the_plain_layer_s_numbers_whatever_fills_a_panel(
    bits: int, num_outputs: int, num_inputs: int
) -> None:
    rng = torch.Generator().manual_seed(bits)
    weight_OI = 0.05 * torch.randn(num_outputs, num_inputs, generator=rng)
    if bits < 16:
        kind = GGMLQuantizationType.Q4_1 if bits == 4 else GGMLQuantizationType.Q8_0
        weight_OI = on_grid(weight_OI, kind)
    elif bits == 16:
        weight_OI = weight_OI.bfloat16().float()
    layer = packed_linear(weight_OI, None, blocks=True, plain=True)
    assert isinstance(layer, BlockLinear)
    assert layer.blocks.bits == bits
    assert torch.equal(layer.dense(), weight_OI)
    # whole tiles and every rest, and more rows than are gone through at once
    for num_rows in (*range(FEW_ROWS + 1, FEW_ROWS + 8), 191, 192, 193, 390):
        inputs = torch.randn(num_rows, num_inputs, generator=rng)
        torch.testing.assert_close(layer(inputs), F.linear(inputs, weight_OI), atol=2e-5, rtol=1e-5)


def test_of_many_rows_each_has_the_numbers_it_has_among_others() -> None:
    layer = packed_linear(weight_of(GGMLQuantizationType.Q4_1, (70, 576)), None, blocks=True)
    inputs = torch.randn(200, 576, generator=torch.Generator().manual_seed(1))
    whole = layer(inputs)
    for num_rows in (FEW_ROWS + 1, 64, 193):
        assert torch.equal(layer(inputs[:num_rows]), whole[:num_rows])


@pytest.mark.parametrize("shape", [(128,), (1, 1, 128), (2, 3, 128), (0, 128)])
def test_inputs_of_any_shape(shape: tuple[int, ...]) -> None:
    weight_OI = weight_of(GGMLQuantizationType.Q8_0)
    inputs = torch.randn(shape)
    found = packed_linear(weight_OI, None, blocks=True)(inputs)
    torch.testing.assert_close(found, F.linear(inputs, weight_OI), atol=2e-6, rtol=1e-5)


def test_inputs_that_are_not_contiguous() -> None:
    weight_OI = weight_of(GGMLQuantizationType.Q4_0)
    inputs = torch.randn(2, 128, 3).transpose(1, 2)
    found = packed_linear(weight_OI, None, blocks=True)(inputs)
    torch.testing.assert_close(found, F.linear(inputs, weight_OI), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("inputs", [torch.zeros(2, 128, dtype=torch.bfloat16), torch.zeros(4, 64)])
def test_inputs_the_kernel_would_read_past_are_refused(inputs: torch.Tensor) -> None:
    layer = packed_linear(weight_of(GGMLQuantizationType.Q8_0), None, blocks=True)
    with pytest.raises(AssertionError):
        layer(inputs)


def test_a_block_of_zeros_lies_on_a_grid() -> None:
    weight_OI = weight_of(GGMLQuantizationType.Q4_1)
    weight_OI[3, 32:64] = 0
    weight_OI[4] = 0
    layer = packed_linear(weight_OI, None, blocks=True)
    assert isinstance(layer, BlockLinear)
    assert torch.equal(torch.stack([layer(unit[None])[0] for unit in torch.eye(128)], dim=1), weight_OI)


@pytest.mark.parametrize("place", [(0, 0), (47, 127), (20, 77)])
@pytest.mark.parametrize("kind", KINDS)
def test_one_weight_off_the_grid_is_enough(kind: GGMLQuantizationType, place: tuple[int, int]) -> None:
    weight_OI = weight_of(kind)
    assert find_blocks(weight_OI) is not None
    weight_OI[place] = torch.nextafter(weight_OI[place] + 1e-3, torch.tensor(1.0))
    assert find_blocks(weight_OI) is None
    assert type(packed_linear(weight_OI, None, blocks=True)) is PackedLinear


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_lie_on_no_grid(bad: float) -> None:
    weight_OI = weight_of(GGMLQuantizationType.Q4_1)
    weight_OI[7, 9] = bad
    assert find_blocks(weight_OI) is None


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("shape", [(48, 128), (5, 40), (1, 8), (131, 24)])
def test_weights_made_from_bfloat16_are_read_as_such_and_others_where_they_lie(
    shape: tuple[int, int], plain: bool
) -> None:
    weight_OI = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    weight_OI = weight_OI if plain else weight_OI.bfloat16().float()
    layer = packed_linear(weight_OI, None, blocks=True, plain=plain)
    assert isinstance(layer, BlockLinear)
    assert layer.blocks.bits == (32 if plain else 16)
    assert torch.equal(torch.stack([layer(unit[None])[0] for unit in torch.eye(shape[1])], dim=1), weight_OI)
    assert torch.equal(layer.dense(), weight_OI)
    inputs = torch.randn(FEW_ROWS + 2, shape[1])
    for num_rows in (1, 2, 4, 6, 9, FEW_ROWS, FEW_ROWS + 2):
        wanted = F.linear(inputs[:num_rows], weight_OI)
        torch.testing.assert_close(layer(inputs[:num_rows]), wanted, atol=2e-5, rtol=1e-5)


def test_a_plain_weight_is_not_copied() -> None:
    weight_OI = torch.randn(5, 40)
    assert packed_linear(weight_OI, None, blocks=True, plain=True).blocks.stored.data_ptr() == weight_OI.data_ptr()


def test_plain_weights_and_odd_widths_and_other_dtypes_are_left_alone() -> None:
    assert find_blocks(nn.Linear(128, 48).weight) is None
    assert find_blocks(torch.zeros(4, 100)) is None
    assert type(packed_linear(torch.randn(4, 100), None, blocks=True, plain=True)) is PackedLinear
    assert find_blocks(torch.zeros(4, 128, dtype=torch.bfloat16)) is None
    assert type(packed_linear(weight_of(GGMLQuantizationType.Q4_1), None, blocks=False)) is PackedLinear


def test_the_nearest_grid_is_one_that_is_found_and_near() -> None:
    weight_OI = torch.randn(24, 128, generator=torch.Generator().manual_seed(3))
    weight_OI[0, :32] = 0
    near = nearest_grid(weight_OI)
    assert (near - weight_OI).abs().max() <= weight_OI.abs().max() / 254 * 1.01
    found = find_blocks(near)
    assert found is not None
    assert found.bits == 8
    assert nearest_grid(torch.randn(4, 40)).shape == (4, 40)
