"""What a tree can't verify is refused by name and with its own reason, and nothing beside it is."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_cli.config.recipe import TargetSettings
from medusa_cli.errors import TargetError
from medusa_cli.model.loading.load import make_target
from medusa_cli.model.loading.refusals import refuse_config
from medusa_cli.model.loading.self_check import self_check
from medusa_cli.model.target import Target
from tests.differential.shrink import CONTEXT, WINDOW, tiny_config
from tests.differential.texts import random_model

REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "blt": ({}, "is no single stack of layers"),
    "xlm": ({}, "keeps no cache of keys and values"),
    "reformer": ({}, "keeps no cache of keys and values"),
    "gemma4_assistant": ({}, "keeps no cache of keys and values"),
    "big_bird": ({}, "is an encoder"),
    "megatron-bert": ({}, "is an encoder"),
    "roberta": ({"is_decoder": True}, "counts positions over the tokens that are no padding"),
    "bloom": ({}, "takes no position ids"),
    "xlm-roberta": ({}, "is an encoder"),
    "trocr": ({}, "takes no position ids"),
    "doge": ({"keep_window_size": WINDOW}, f"looks at {WINDOW} keys of its own choice"),
}
FIT = [("gpt_neox", {}), ("doge", {}), ("megatron-bert", {"is_decoder": True}), ("gemma3n_text", {}), ("xglm", {})]


def target_of(model_type: str, **changes: Any) -> Target:
    torch.set_num_threads(1)
    settings = TargetSettings(model=model_type, device="cpu", runner="eager", dtype="float32")
    return make_target(random_model(tiny_config(model_type, **changes)), None, settings)


@pytest.mark.parametrize("model_type", REASONS)
def test_an_architecture_is_refused_by_its_config_and_with_its_own_reason(model_type: str) -> None:
    changes, reason = REASONS[model_type]
    with pytest.raises(TargetError) as caught:
        refuse_config(tiny_config(model_type, **changes), "some/model")
    assert caught.value.message.startswith(f"some/model ({model_type}) {reason}")
    assert caught.value.hint
    assert "\n" not in caught.value.message + caught.value.hint


@pytest.mark.parametrize(("model_type", "changes"), FIT)
def test_what_only_looks_like_one_of_them_verifies_trees(model_type: str, changes: dict[str, Any]) -> None:
    refuse_config(tiny_config(model_type, **changes), model_type)
    assert self_check(target_of(model_type, **changes)).ok


def test_readme_names_a_model_for_each_reason_to_refuse_one() -> None:
    text = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    table = text[text.index("Refused, by name") : text.index("## Files")]
    named = set(re.findall(r"\w+", table.lower().replace("-", "")))
    for reason in {reason for _, reason in REASONS.values()} | {"forgets what is"}:
        models = [name for name, (_, why) in REASONS.items() if why == reason] or ["moshi"]
        assert named & {re.sub(r"[-_]", "", name) for name in models}, reason


def test_a_window_of_the_cache_alone_is_refused_where_a_text_can_leave_it() -> None:
    with pytest.raises(TargetError, match=f"moshi .moshi. forgets what is {WINDOW} tokens back, but not within a"):
        target_of("moshi", sliding_window=WINDOW)
    assert target_of("moshi", sliding_window=CONTEXT).kinds == {"full_attention": None}


@pytest.mark.parametrize("model_type", ["mistral", "gemma3_text", "starcoder2"])
def test_a_window_of_cache_and_mask_is_not_refused(model_type: str) -> None:
    changes = {} if model_type == "gemma3_text" else {"sliding_window": WINDOW}
    assert WINDOW in target_of(model_type, **changes).kinds.values()
