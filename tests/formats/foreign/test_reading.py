"""Heads of other tools: known by the names of their tensors, counted, and refused by name."""

import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import linear, silu

from medusa_cli.errors import FormatError, HeadsMismatch
from medusa_cli.formats.foreign.portable import portable
from medusa_cli.formats.foreign.reading import find_foreign, heads_of
from medusa_cli.formats.foreign.writing import write
from medusa_cli.formats.native import write_heads
from medusa_cli.registry import format_of, read_config, read_heads
from tests.formats.foreign.helpers import laid_out, published, same, whole_heads, written
from tests.tiny_heads import HIDDEN, REAL, VOCAB, FakeTarget, some_heads

TARGET = FakeTarget()


def by_hand(tensors: dict[str, torch.Tensor], layers: int, hidden: torch.Tensor, output: Any) -> torch.Tensor:
    """Draft logits of head after head, straight from the published names."""
    heads = 1 + max(int(name.split(".")[0]) for name in tensors)
    drafts = []
    for head in range(heads):
        inner = hidden
        for layer in range(layers):
            bias = tensors.get(f"{head}.{layer}.linear.bias")
            inner = inner + silu(linear(inner, tensors[f"{head}.{layer}.linear.weight"], bias))
        drafts.append(inner @ (tensors[f"{head}.{layers}.weight"] if output is None else output).T)
    return torch.stack(drafts, 1)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors", "medusa_lm_head.bin"])
@pytest.mark.parametrize("version", [1, 2])
def test_both_versions_are_told_by_their_tensors_and_draft_as_a_loop_over_them(
    version: int, file: str, layers: int, tmp_path: Path
) -> None:
    tensors = published(3, layers, HIDDEN, VOCAB if version == 1 else None)
    heads = read_heads(laid_out(tmp_path, tensors, file, medusa_num_heads=3), TARGET)
    assert heads.config.own_output == (version == 1)
    hidden = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    wanted = by_hand(tensors, layers, hidden, None if version == 1 else TARGET.output_weight)[..., :REAL]
    torch.testing.assert_close(heads(hidden), wanted)


def test_ids_that_the_tokenizer_does_not_know_are_not_drafted(tmp_path: Path) -> None:
    heads = read_heads(laid_out(tmp_path, published(2, 1, HIDDEN, VOCAB)), TARGET)
    assert heads.draft_ids.tolist() == list(range(REAL))


def test_heads_without_biases_are_read_with_zeros(tmp_path: Path) -> None:
    heads = read_heads(laid_out(tmp_path, published(2, 1, HIDDEN, None, biases=False)), TARGET)
    assert not heads.state_dict()["bias"].any()


@pytest.mark.parametrize("prefix", ["medusa_head.", "medusa_heads."])
def test_heads_beside_a_model_are_found_among_its_tensors(prefix: str, tmp_path: Path) -> None:
    tensors = published(2, 1, HIDDEN, VOCAB)
    merged = {prefix + name: value for name, value in tensors.items()} | {"model.norm.weight": torch.ones(HIDDEN)}
    heads = read_heads(laid_out(tmp_path, merged, "model.safetensors"), TARGET)
    assert torch.equal(heads.state_dict()["weight"][0, 1], tensors["1.0.linear.weight"])
    assert format_of(tmp_path).name == ("medusa2" if prefix == "medusa_head." else "modelopt")


def test_heads_in_several_shards_are_read_whole(tmp_path: Path) -> None:
    tensors = {f"medusa_head.{name}": value for name, value in published(3, 1, HIDDEN, VOCAB).items()}
    names = sorted(tensors)
    laid_out(tmp_path, {name: tensors[name] for name in names[:4]}, "model-00001-of-00002.safetensors")
    laid_out(tmp_path, {name: tensors[name] for name in names[4:]}, "model-00002-of-00002.safetensors")
    assert read_config(tmp_path).num_heads == 3


def test_a_config_that_lies_is_told_and_the_tensors_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = laid_out(tmp_path, published(5, 1, HIDDEN, VOCAB), medusa_num_heads=2, medusa_num_layers=3)
    with caplog.at_level(logging.WARNING):
        assert read_config(folder).num_heads == 5
    assert "num_heads is 2, and the tensors hold 5" in caplog.text
    assert "num_layers is 3, and the tensors hold 1" in caplog.text


def test_a_vllm_config_without_the_flag_for_biases_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = {"blocks.0.layers.0.weight": torch.ones(HIDDEN, HIDDEN), "blocks.0.layers.0.bias": torch.ones(HIDDEN)}
    read_config(laid_out(tmp_path, tensors, "model.safetensors", model_type="medusa"))
    assert "medusa_fc_bias" in caplog.text


def test_a_token_map_names_the_ids_of_a_shared_output(tmp_path: Path) -> None:
    tensors = {
        "blocks.0.layers.0.weight": torch.ones(HIDDEN, HIDDEN),
        "lm_head.weight": TARGET.output_weight[[4, 9, 1]],
        "token_map": torch.tensor([4, 9, 1]),
    }
    heads = read_heads(laid_out(tmp_path, tensors, "model.safetensors"), TARGET)
    assert heads.draft_ids.tolist() == [4, 9, 1]
    assert not heads.config.own_output, "these rows are the target's"


class Evil:
    """A pickle of this creates a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_asks_for_more_than_tensors_runs_nothing(zipped: bool, tmp_path: Path) -> None:
    content = {**published(1, 1, HIDDEN, None), "x": Evil(tmp_path / "ran")}
    file = tmp_path / "medusa_lm_head.pt"
    if zipped:
        torch.save(content, file)
    else:
        file.write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(FormatError, match="could run any code"):
        read_config(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_two_formats_in_a_folder_are_named(tmp_path: Path) -> None:
    laid_out(tmp_path, published(2, 1, HIDDEN, VOCAB))
    laid_out(tmp_path, {"blocks.0.layers.0.weight": torch.ones(HIDDEN, HIDDEN)}, "model.safetensors")
    with pytest.raises(FormatError, match="2 formats: fasterdecoding and vllm"):
        read_config(tmp_path)
    assert heads_of(find_foreign(tmp_path, "fasterdecoding")).config.num_heads == 2


def test_our_own_heads_come_first(tmp_path: Path) -> None:
    write_heads(some_heads(), tmp_path)
    laid_out(tmp_path, published(5, 1, HIDDEN, VOCAB))
    assert read_config(tmp_path).num_heads == some_heads().config.num_heads


def test_safetensors_count_where_the_same_heads_lie_as_a_pickle_too(tmp_path: Path) -> None:
    laid_out(tmp_path, published(2, 1, HIDDEN, VOCAB))
    laid_out(tmp_path, published(3, 1, HIDDEN, VOCAB), "medusa_lm_head.safetensors")
    assert read_config(tmp_path).num_heads == 3


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"1.0.linear.weight": None}, "bias of head 1, block 0 has no weight"),
        ({"0.0.linear.bias": None}, "bias of head 0, block 0"),
        ({"1.1.weight": None}, "head 1 has no output"),
        ({"1.1.weight": (VOCAB, HIDDEN - 1)}, "1.1.weight is 50 x 15"),
        ({"1.0.linear.weight": (HIDDEN, HIDDEN + 1)}, "1.0.linear.weight is 16 x 17"),
        ({"0.0.linear.bias": (3,)}, "0.0.linear.bias is 3"),
        ({"0.0.linear.weight_scale": (1,)}, "weight_scale belongs to no head"),
        ({"3.0.linear.weight": (HIDDEN, HIDDEN)}, "head 2 lacks the weight of block 0"),
        ({"0.2.weight": (VOCAB, HIDDEN)}, "stands at place"),
    ],
)
def test_tensors_that_are_missing_or_of_other_sizes_are_named(
    change: dict[str, Any], told: str, tmp_path: Path
) -> None:
    tensors = published(2, 1, HIDDEN, VOCAB)
    for name, shape in change.items():
        if shape is None:
            del tensors[name]
        else:
            tensors[name] = torch.ones(shape)
    with pytest.raises(FormatError, match=told):
        read_heads(laid_out(tmp_path, tensors), TARGET)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_are_refused(number: float, tmp_path: Path) -> None:
    tensors = published(2, 1, HIDDEN, None)
    tensors["1.0.linear.weight"][0, 0] = number
    with pytest.raises(FormatError, match="not finite"):
        read_heads(laid_out(tmp_path, tensors), TARGET)


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    tensors = {name: value.to(torch.int8) for name, value in published(1, 1, HIDDEN, None).items()}
    with pytest.raises(FormatError, match="stored as int8"):
        read_heads(laid_out(tmp_path, tensors), TARGET)


def test_heads_of_another_size_are_another_models(tmp_path: Path) -> None:
    folder = laid_out(tmp_path, published(1, 1, HIDDEN * 2, None), base_model_name_or_path="lmsys/other")
    with pytest.raises(HeadsMismatch, match="hidden size of 32; tiny has 16") as caught:
        read_heads(folder, TARGET)
    assert "lmsys/other" in caught.value.hint


def test_more_rows_than_the_model_has_are_another_models(tmp_path: Path) -> None:
    with pytest.raises(HeadsMismatch, match="vocabulary of 51; tiny has 50"):
        read_heads(laid_out(tmp_path, published(1, 1, HIDDEN, VOCAB + 1)), TARGET)


def test_a_model_without_heads_is_told(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="holds no Medusa heads that this program can read"):
        read_config(laid_out(tmp_path, {"model.norm.weight": torch.ones(3)}, "model.safetensors"))


@pytest.mark.parametrize("tool", ["fasterdecoding", "trtllm", "tgi", "vllm", "medusa2"])
@pytest.mark.parametrize("own_output", [True, False])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_heads_come_back_bit_equal_from_every_format(
    tool: str, own_output: bool, num_layers: int, tmp_path: Path
) -> None:
    heads = whole_heads(num_layers=num_layers, own_output=own_output)
    found = read_heads(written(tmp_path, tool, heads), TARGET)
    assert same(found, heads)
    assert found.config.own_output == own_output
    # and what comes back is written as it was before
    again = written(tmp_path / "again", tool, found)
    for file in sorted(again.iterdir()):
        assert file.read_bytes() == (tmp_path / file.name).read_bytes(), file.name


def test_the_published_shapes_of_vicuna_heads_are_read_and_written(tmp_path: Path) -> None:
    """Five heads of 4096 over 32,000 tokens in 16 bits, and a config that says two; numbers repeat to be quick."""
    hidden, vocab = 4096, 32_000
    rows = torch.randn(hidden * 8, generator=torch.Generator().manual_seed(0)).half().view(8, hidden) * 0.02
    square, wide = rows.repeat(hidden // 8, 1), rows.repeat(vocab // 8, 1)
    tensors = {}
    for head in range(5):
        tensors |= {f"{head}.0.linear.weight": square, f"{head}.0.linear.bias": rows[0], f"{head}.1.weight": wide}
    config = {"base_model_name_or_path": "lmsys/vicuna-7b-v1.3", "medusa_num_heads": 2, "medusa_num_layers": 1}
    folder = laid_out(tmp_path / "in", tensors, **config)
    target = FakeTarget(hidden_size=hidden, vocab_size=vocab, real_vocab=vocab, dtype=torch.float16, output_weight=wide)
    heads = read_heads(folder, target)
    assert (heads.config.num_heads, heads.config.own_output) == (5, False), "all outputs are the model's"
    for tool in ("fasterdecoding", "tgi"):
        write(tool, portable(heads, target, tool, force=False).heads, tmp_path / tool)
        assert same(read_heads(tmp_path / tool, target), heads)
