"""Packed weights give the plain layer's numbers, for every shape of input."""

import pytest
import torch
from torch import nn

from medusa_cli.errors import TargetError
from medusa_cli.kernels.blocks import BlockLinear
from medusa_cli.kernels.native import CannotCompile
from medusa_cli.kernels.packed import PackedLinear, can_pack
from medusa_cli.model.runners import kinds as runner_room
from medusa_cli.model.runners.kinds import pack
from medusa_cli.model.runners.select import choose_runner
from tests.tiny_models import quantised_model, target_of, tiny_model

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not can_pack(CPU, torch.float32), reason="this build of torch has no oneDNN")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (3, 1), (1, 20), (3, 17), (2, 3, 5), (130, 1)])
def test_a_packed_layer_gives_the_plain_layer_s_numbers(shape: tuple[int, ...], bias: bool) -> None:
    plain = nn.Linear(24, 50, bias=bias)
    inputs = torch.randn(*shape, 24)
    with torch.inference_mode():
        found = PackedLinear(plain.weight, plain.bias)(inputs)
        torch.testing.assert_close(found, plain(inputs), atol=1e-6, rtol=1e-5)


def test_a_packed_layer_reads_inputs_that_are_not_contiguous() -> None:
    plain = nn.Linear(24, 50)
    inputs = torch.randn(3, 24, 7).transpose(1, 2)
    with torch.inference_mode():
        found = PackedLinear(plain.weight, plain.bias)(inputs)
        torch.testing.assert_close(found, plain(inputs), atol=1e-6, rtol=1e-5)


def test_every_linear_layer_is_packed_and_no_embedding() -> None:
    model = nn.ModuleDict(
        {"embed": nn.Embedding(50, 24), "inner": nn.Sequential(nn.Linear(24, 8), nn.ReLU()), "out": nn.Linear(24, 50)}
    )
    model["out"].weight = model["embed"].weight
    shared = model["embed"].weight
    pack(model, blocks=False)
    assert isinstance(model["inner"][0], PackedLinear)
    assert isinstance(model["out"], PackedLinear)
    assert model["embed"].weight is shared
    assert torch.equal(model["out"].packed.to_dense(), shared)


def test_packing_is_for_float32_on_a_cpu() -> None:
    assert choose_runner("auto", CPU, torch.float32) == "auto"
    assert choose_runner("auto", CPU, torch.bfloat16) == "eager"
    assert choose_runner("eager", CPU, torch.float32) == "eager"
    with pytest.raises(TargetError, match="packed runner needs float32 on a CPU"):
        choose_runner("packed", CPU, torch.bfloat16)
    with pytest.raises(TargetError, match="packed runner needs float32 on a CPU"):
        choose_runner("packed", torch.device("cuda"), torch.float32)


def test_the_tiny_models_are_left_as_they_were() -> None:
    assert not any(isinstance(module, PackedLinear) for module in tiny_model("llama").modules())


@pytest.mark.parametrize(
    ("wanted", "weights", "runner"),
    [
        ("auto", "on a grid", "blocks"),
        ("blocks", "on a grid", "blocks"),
        ("packed", "on a grid", "packed"),
        ("eager", "on a grid", "eager"),
        ("auto", "plain", "packed"),
    ],
)
def test_weights_on_a_grid_are_read_in_blocks_unless_another_runner_is_asked_for(
    wanted: str, weights: str, runner: str
) -> None:
    target = target_of(quantised_model() if weights == "on a grid" else tiny_model("llama"), runner=wanted)
    assert target.identity.runner == runner
    layers = [type(module) for module in target.model.modules() if isinstance(module, nn.Linear | PackedLinear)]
    assert {*layers} == {{"blocks": BlockLinear, "packed": PackedLinear, "eager": nn.Linear}[runner]}


def test_blocks_that_can_not_be_had_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TargetError, match="no weights of this model fit 4, 8 or 16 bits"):
        target_of(tiny_model("llama"), runner="blocks")
    monkeypatch.setattr(runner_room, "functions", no_compiler)
    with pytest.raises(TargetError, match="the blocks runner can't run: no C"):
        target_of(quantised_model(), runner="blocks")


def test_without_a_compiler_the_runner_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_room, "functions", no_compiler)
    assert target_of(quantised_model(), runner="auto").identity.runner == "packed"


def no_compiler() -> None:
    raise CannotCompile("no C++ compiler")
