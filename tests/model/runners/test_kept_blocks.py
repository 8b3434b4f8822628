"""Blocks kept between starts: the second start seeks nothing, and damage costs time and never a number."""

import copy
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import nn

from medusa_cli.kernels import layout
from medusa_cli.kernels.blocks import BlockLinear
from medusa_cli.model.runners.kept_blocks import FILE, folder_of
from medusa_cli.model.runners.kinds import lay_out, why_no_blocks
from medusa_cli.util import sealed
from tests.tiny_models import on_grid

pytestmark = pytest.mark.skipif(why_no_blocks() is not None, reason="no C++ compiler")


def model_on_grids(seed: int = 0) -> nn.Module:
    """Layers on a grid of 4 bits, on one of 8, in bfloat16, and on none."""
    rng = torch.Generator().manual_seed(seed)

    def linear(weight: torch.Tensor) -> nn.Linear:
        made = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        made.weight = nn.Parameter(weight, requires_grad=False)
        return made

    noise = torch.randn(8, 64, generator=rng)
    four, eight = (on_grid(noise, kind) for kind in (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0))
    return nn.Sequential(linear(four), nn.Sequential(linear(eight)), linear(noise.bfloat16().float()), linear(noise))


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir(0o700)
    monkeypatch.setenv("MEDUSA_HOME", str(home))


@pytest.fixture
def sought(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each weight whose blocks are sought."""
    counts: list[int] = []
    seek = layout.find_blocks
    monkeypatch.setattr(layout, "find_blocks", lambda weight: counts.append(1) or seek(weight))
    return counts


def dense_of(model: nn.Module) -> list[torch.Tensor]:
    return [module.dense() for module in model.modules() if isinstance(module, BlockLinear)]


def test_a_second_start_seeks_no_grid_and_has_the_same_weights(sought: list[int]) -> None:
    first, second = model_on_grids(), model_on_grids()
    weights = [module.weight.clone() for module in first.modules() if isinstance(module, nn.Linear)]
    assert lay_out(first, "blocks", "files") == "blocks"
    assert len(sought) == 4
    assert lay_out(second, "blocks", "files") == "blocks"
    assert len(sought) == 4 + 2, "those in bfloat16, or on no grid"
    assert all(map(torch.equal, dense_of(second), weights))
    assert [layer.blocks.bits for layer in second.modules() if isinstance(layer, BlockLinear)] == [4, 8, 16]
    inputs = torch.randn(3, 64)
    assert torch.equal(second[0](inputs), first[0](inputs))


def test_other_files_have_other_blocks_and_a_model_without_files_none(sought: list[int]) -> None:
    lay_out(model_on_grids(), "blocks", "files")
    other = model_on_grids(seed=1)
    wanted = [copy.deepcopy(layer.weight) for layer in other.modules() if isinstance(layer, nn.Linear)]
    lay_out(other, "blocks", "other files")
    assert all(map(torch.equal, dense_of(other), wanted))
    before = sorted(folder_of("files").parent.iterdir())
    lay_out(model_on_grids(), "blocks")
    assert len(sought) == 12
    assert sorted(folder_of("files").parent.iterdir()) == before


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_damaged_blocks_are_made_anew(damage: str, sought: list[int]) -> None:
    lay_out(model_on_grids(), "blocks", "files")
    file = folder_of("files") / FILE
    content = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(content[:-9] if damage == "cut" else content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    model = model_on_grids()
    weights = [module.weight.clone() for module in model.modules() if isinstance(module, nn.Linear)]
    lay_out(model, "blocks", "files")
    assert len(sought) == 8
    assert all(map(torch.equal, dense_of(model), weights))
    assert sealed.fault_in(folder_of("files")) is None
    assert file.read_bytes() == content


def test_where_nothing_can_be_kept_a_start_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sealed, "make", full)
    assert lay_out(model_on_grids(), "blocks", "files") == "blocks"
    assert not folder_of("files").exists()
