"""What transformers would drop from a GGUF file without a word is refused before any weight is read."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from medusa_cli.errors import TargetError
from medusa_cli.model.loading.gguf_header import read_header
from medusa_cli.model.loading.sources import find_source
from tests.tiny_folders import save_gguf

FACTORS = np.array([1, 1, 4, 8], np.float32)


def refusal(path: Path) -> TargetError:
    with pytest.raises(TargetError) as raised:
        find_source(str(path))
    return raised.value


def test_a_header_is_read_without_its_arrays(tmp_path: Path) -> None:
    header = read_header(save_gguf(tmp_path / "tiny.gguf", {"general.author": "né"}, {"rope_freqs.weight": FACTORS}))
    assert header is not None
    assert header.values["general.architecture"] == "llama"
    assert header.values["general.author"] == "né"
    assert header.values["llama.context_length"] == 64
    assert header.values["tokenizer.ggml.tokens"] is None
    assert header.factors == {"rope_freqs.weight": (1, 1, 4, 8)}


@pytest.mark.parametrize("name", ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"])
def test_factors_of_rotary_frequencies_are_refused_by_name(name: str, tmp_path: Path) -> None:
    error = refusal(save_gguf(tmp_path / "tiny.gguf", tensors={name: FACTORS}))
    assert f"scales its positions by factors of their own ({name}), and transformers drops them" in error.message
    assert ".safetensors" in error.hint


def test_more_layers_than_tensors_are_refused_before_any_is_built(tmp_path: Path) -> None:
    file = save_gguf(tmp_path / "tiny.gguf", {"more.block_count": 9_000})
    error = refusal(file)
    assert "says that it has 9,000 layers, and holds " in error.message
    assert "copy or download it again" in error.hint


def test_factors_that_change_nothing_are_none(tmp_path: Path) -> None:
    file = save_gguf(tmp_path / "tiny.gguf", tensors={"rope_freqs.weight": np.ones(4, np.float32)})
    assert find_source(str(file)).gguf == file


@pytest.mark.parametrize(
    "said",
    [
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0},
        {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.attn_factor": 1.0},
        {"llama.rope.scale_linear": 4.0},
    ],
)
def test_scaled_positions_are_refused_with_what_the_file_says(said: dict[str, Any], tmp_path: Path) -> None:
    error = refusal(save_gguf(tmp_path / "tiny.gguf", said))
    assert "scales its positions (" in error.message
    for key, value in said.items():
        assert f"{key}={value}" in error.message


@pytest.mark.parametrize(
    "said",
    [
        {"llama.rope.scaling.type": "none"},
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1.0},
        {"llama.rope.scaling.finetuned": 1},
    ],
)
def test_positions_scaled_by_one_are_plain(said: dict[str, Any], tmp_path: Path) -> None:
    file = save_gguf(tmp_path / "tiny.gguf", said)
    assert find_source(str(file)).gguf == file


def test_one_part_of_several_is_named_with_the_way_to_merge(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        save_gguf(tmp_path / f"big-0000{number}-of-00003.gguf", {"split.count": 3, "split.no": number - 1})
    second = refusal(tmp_path / "big-00002-of-00003.gguf")
    assert "is part 2 of 3 of a model" in second.message
    assert "llama-gguf-split --merge big-00001-of-00003.gguf whole.gguf" in second.hint
    assert "is part 1 of 3" in refusal(tmp_path).message, "a folder of parts is no choice of several models"


@pytest.mark.parametrize("key", ["llama.block_count", "llama.embedding_length"])
def test_a_size_that_is_not_there_is_refused_before_a_large_model_is_made_up(key: str, tmp_path: Path) -> None:
    file = save_gguf(tmp_path / "tiny.gguf")
    damaged = file.read_bytes().replace(key.encode(), key.replace("_", "-").encode(), 1)
    file.write_bytes(damaged)
    error = refusal(file)
    assert f"doesn't say its sizes: {key}" in error.message
    assert "damaged or incomplete" in error.hint


@pytest.mark.parametrize("kept", [5, 30, 400])
def test_a_header_that_is_cut_short_is_none(kept: int, tmp_path: Path) -> None:
    file = save_gguf(tmp_path / "tiny.gguf")
    file.write_bytes(file.read_bytes()[:kept])
    assert read_header(file) is None
