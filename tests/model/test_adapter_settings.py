"""adapter_config.json: a plain LoRA's is read, and every other is refused by the setting's name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_cli.errors import FormatError
from medusa_cli.model.adapter_settings import CONFIG, check_ranks, read_adapter_settings

PLAIN = {
    "peft_type": "LORA", "r": 4, "lora_alpha": 16, "lora_dropout": 0.05, "target_modules": ["q_proj"], "bias": "none",
    "fan_in_fan_out": False, "init_lora_weights": True, "rank_pattern": {}, "megatron_config": None, "use_dora": False,
    "megatron_core": "megatron.core", "loftq_config": {}, "qalora_group_size": 16, "peft_version": "0.21.2",
}  # fmt: skip


def read(folder: Path, **changes: Any) -> dict[str, Any]:
    (folder / CONFIG).write_text(json.dumps({**PLAIN, **changes}))
    return read_adapter_settings(folder)


def test_a_plain_lora_s_settings_are_read_as_they_stand(tmp_path: Path) -> None:
    assert read(tmp_path) == PLAIN


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("r", 0), ("r", "4"), ("r", 10**400), ("r", [4]), ("lora_alpha", float("nan")), ("lora_dropout", 7),
        ("target_modules", {"q_proj": 1}), ("target_modules", [1]), ("target_modules", []), ("peft_type", "IA3"),
        ("bias", "all"), ("rank_pattern", []), ("rank_pattern", {"q": "x"}), ("fan_in_fan_out", None),
    ],
)  # fmt: skip
def test_another_type_than_its_own_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(FormatError, match=f"{CONFIG}: {name}"):
        read(tmp_path, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("megatron_config", {"a": 1}), ("use_dora", True), ("modules_to_save", ["x"]), ("new", 1)]
)
def test_what_can_t_be_merged_is_refused_by_name(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(FormatError, match=f"it uses {name}, which can't be merged here"):
        read(tmp_path, **{name: value})


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b"null"])
def test_what_is_no_object_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / CONFIG).write_bytes(content)
    with pytest.raises(FormatError, match="adapter"):
        read_adapter_settings(tmp_path)


def test_a_rank_that_no_number_has_is_refused(tmp_path: Path) -> None:
    tensors = {"a.lora_A.weight": torch.zeros(4, 8), "a.lora_B.weight": torch.zeros(8, 4)}
    check_ranks(read(tmp_path), tensors, tmp_path)
    for changes in ({"r": 2**20}, {"rank_pattern": {"q_proj": 9}}):
        with pytest.raises(FormatError, match="names a rank of"):
            check_ranks(read(tmp_path, **changes), tensors, tmp_path)
