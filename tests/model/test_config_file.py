"""What a config.json says on how its model is run: attention is for us to choose, and outputs are as we want them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from medusa_cli.config.recipe import TargetSettings
from medusa_cli.model import attention as grouped
from medusa_cli.model.loading.huggingface import fetch_config
from medusa_cli.model.loading.load import load_target
from medusa_cli.model.loading.sources import Source
from tests.tiny_folders import save_tiny


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def edited(folder: Path, **changes: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


ATTENTIONS = ["flash_attention_2", "flex_attention", "sdpa", "nosuch", 3, {"text_config": "nosuch"}, {"": "nosuch"}]


@pytest.mark.parametrize(("asked", "wanted"), [("auto", grouped.NAME), ("eager", "eager"), ("sdpa", "sdpa")])
@pytest.mark.parametrize("named", ATTENTIONS, ids=str)
def test_the_attention_that_a_config_names_never_overrides_ours(
    tmp_path: Path, named: Any, asked: Any, wanted: str
) -> None:
    folder = edited(save_tiny(tmp_path), _attn_implementation=named)
    target = load_target(TargetSettings(model=str(folder), device="cpu", attention=asked, runner="eager"))
    assert target.identity.attention == wanted
    assert target.config._attn_implementation == wanted


@pytest.mark.parametrize("asked", ["auto", "eager"])
@pytest.mark.parametrize(
    "changes",
    [
        {"_experts_implementation": "nosuch"},
        {"return_dict": False},
        {"output_attentions": True},
        {"output_hidden_states": True},
        {"use_cache": False},
    ],
    ids=lambda changes: next(iter(changes)),
)
@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_what_a_forward_returns_is_not_the_config_s_to_say(
    tmp_path: Path, model_type: str, changes: dict[str, Any], asked: Any
) -> None:
    folder = edited(save_tiny(tmp_path, model_type), **changes)
    settings = TargetSettings(model=str(folder), device="cpu", attention=asked, runner="eager")
    assert load_target(settings).num_layers == 2


def test_attention_named_for_the_text_model_alone_is_left_out_too(tmp_path: Path) -> None:
    config = AutoConfig.for_model("gemma3").to_dict()
    config["text_config"].update(_attn_implementation="nosuch", return_dict=False)
    (tmp_path / "config.json").write_text(json.dumps({**config, "_attn_implementation": "flex_attention"}))
    found = fetch_config(Source("tiny", str(tmp_path)), None)
    assert [part._attn_implementation for part in (found, found.text_config, found.vision_config)] == [None] * 3
    assert found.text_config.return_dict
