"""What other tools can hold, what they are given, and readers of their own kind that would notice a mistake."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from medusa_cli.errors import FormatError
from medusa_cli.formats.foreign.independent import FAILURES, READERS
from medusa_cli.formats.foreign.portable import portable
from medusa_cli.formats.foreign.writing import TOOLS
from medusa_cli.heads.config import HydraConfig
from medusa_cli.heads.medusa import HydraHeads
from tests.formats.foreign.helpers import whole_heads, written
from tests.tiny_heads import HIDDEN, REAL, VOCAB, FakeTarget, some_heads

TARGET = FakeTarget()
STATES = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(8))
ALONE = [tool for tool in TOOLS if tool != "medusa2"]


@pytest.mark.parametrize("tool", ALONE)
@pytest.mark.parametrize("own_output", [True, False])
def test_the_tools_own_steps_give_the_same_draft_logits(tool: str, own_output: bool, tmp_path: Path) -> None:
    heads = whole_heads(own_output=own_output)
    logits = READERS[tool](written(tmp_path, tool, heads), STATES, TARGET.output_weight)
    assert logits.shape == (6, heads.config.num_heads, VOCAB)
    torch.testing.assert_close(logits[..., :REAL], heads(STATES))


@pytest.mark.parametrize("tool", ["vllm", "tgi", "trtllm"])
def test_several_layers_are_read_in_their_order(tool: str, tmp_path: Path) -> None:
    heads = whole_heads(num_layers=2)
    logits = READERS[tool](written(tmp_path, tool, heads), STATES, TARGET.output_weight)
    torch.testing.assert_close(logits[..., :REAL], heads(STATES))


def test_a_narrow_vocabulary_is_widened_where_the_output_is_the_models(tmp_path: Path) -> None:
    heads = some_heads()
    made = portable(heads, TARGET, "vllm", force=False)
    assert "a draft vocabulary of 20 becomes the model's 50" in made.notes[0]
    logits = READERS["vllm"](written(tmp_path, "vllm", heads), STATES, TARGET.output_weight)
    torch.testing.assert_close(logits[..., heads.draft_ids], heads(STATES))


def swapped(names: dict[str, torch.Tensor], one: str, other: str) -> dict[str, torch.Tensor]:
    """The tensors of two heads or layers in each other's place."""
    return {
        (name.replace(one, other) if one in name else name.replace(other, one)): value for name, value in names.items()
    }


@pytest.mark.parametrize(("one", "other"), [("blocks.0.", "blocks.1."), ("layers.0.", "layers.1.")])
def test_heads_or_layers_in_another_order_are_noticed(one: str, other: str, tmp_path: Path) -> None:
    heads = whole_heads(num_layers=2)
    file = written(tmp_path, "vllm", heads) / "model.safetensors"
    save_file(swapped(load_file(file), one, other), file)
    logits = READERS["vllm"](tmp_path, STATES, TARGET.output_weight)
    assert (logits[..., :REAL] - heads(STATES)).abs().max() > 0.1


def test_a_reader_that_ties_layers_is_noticed(tmp_path: Path) -> None:
    heads = whole_heads(num_layers=2)
    logits = READERS["fasterdecoding"](written(tmp_path, "fasterdecoding", heads), STATES, TARGET.output_weight)
    assert (logits[..., :REAL] - heads(STATES)).abs().max() > 0.1


@pytest.mark.parametrize(
    ("tool", "changes"),
    [
        ("tgi", {"architectures": ["MedusaModel"]}),
        ("tgi", {"model_type": "medusa"}),
        ("tgi", {"base_model_name_or_path": ""}),
        ("trtllm", {"num_medusa_heads": None}),
        ("trtllm", {"num_medusa_heads": 9}),
        ("vllm", {"hidden_size": None}),
        ("vllm", {"num_heads": 4}),
        ("vllm", {"architectures": ["LlamaForCausalLM"]}),
        ("vllm", {"original_lm_head": False}),
        ("fasterdecoding", {"medusa_num_heads": 4}),
    ],
)
def test_a_config_that_the_tool_would_stumble_over_is_noticed(
    tool: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    file = written(tmp_path, tool, whole_heads()) / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    with pytest.raises(FAILURES):
        READERS[tool](tmp_path, STATES, TARGET.output_weight)


def test_vllm_without_the_flag_drops_biases_and_that_is_noticed(tmp_path: Path) -> None:
    heads = whole_heads()
    file = written(tmp_path, "vllm", heads) / "config.json"
    file.write_text(file.read_text().replace('"medusa_fc_bias": true', '"medusa_fc_bias": false'))
    logits = READERS["vllm"](tmp_path, STATES, TARGET.output_weight)
    assert (logits[..., :REAL] - heads(STATES)).abs().max() > 0.1


@pytest.mark.parametrize("tool", TOOLS)
def test_equal_heads_make_equal_bytes(tool: str, tmp_path: Path) -> None:
    for name in ("one", "two"):
        written(tmp_path / name, tool, whole_heads())
    files = sorted(file.name for file in (tmp_path / "one").iterdir())
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in files)


def test_a_pickle_holds_what_heads_share_once(tmp_path: Path) -> None:
    shared, own = (written(tmp_path / f"{own}", "trtllm", whole_heads(own_output=own)) for own in (False, True))
    sizes = [(folder / "medusa_lm_head.pt").stat().st_size for folder in (shared, own)]
    assert sizes[1] - sizes[0] > 1.5 * VOCAB * HIDDEN * 4


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(
    ("heads", "told"),
    [
        (lambda: some_heads(sees_root=True), "see the root"),
        (lambda: some_heads(output_bias=True), "output_bias"),
        (lambda: some_heads(own_output=True), "narrowed vocabulary"),
        (lambda: hydra(), "path heads"),
        (lambda: adapted(), "an adapter"),
    ],
)
def test_what_a_tool_can_not_hold_is_refused_by_name(heads: Any, told: str, tool: str) -> None:
    with pytest.raises(FormatError, match=told) as caught:
        portable(heads(), TARGET, tool, force=False)
    assert caught.value.hint


def hydra() -> HydraHeads:
    config = {**dict(some_heads(sees_root=True).config), "type": "hydra"}
    return HydraHeads.fresh(HydraConfig(**config), torch.arange(20), TARGET.output_weight)


def adapted() -> Any:
    heads = whole_heads()
    heads.config = heads.config.model_copy(update={"adapter": "abc"})
    return heads


@pytest.mark.parametrize("tool", ["fasterdecoding", "medusa2"])
def test_layers_that_a_reader_ties_are_refused_unless_forced(tool: str) -> None:
    heads = whole_heads(num_layers=2)
    with pytest.raises(FormatError, match="2 layers a head"):
        portable(heads, TARGET, tool, force=False)
    assert "ties the 2 layers" in portable(heads, TARGET, tool, force=True).notes[0]


def test_a_disk_that_is_full_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("medusa_cli.formats.foreign.writing.save_file", full)
    with pytest.raises(FormatError, match="No space left"):
        written(tmp_path, "vllm", whole_heads())
