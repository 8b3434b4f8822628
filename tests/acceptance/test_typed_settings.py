"""Settings of a generation_config: another type, another range or another vocabulary is told by the setting's name."""

from typing import Any

import pytest
import torch

from medusa_cli.acceptance.logits_processors import shaping_of
from medusa_cli.acceptance.typed_settings import check_types, try_out
from medusa_cli.errors import RecipeError

CPU = torch.device("cpu")
FINE: dict[str, Any] = {
    "sequence_bias": [[[9], -1.0], [[3, 4], 2.0]], "repetition_penalty": 1.1, "no_repeat_ngram_size": 3,
    "bad_words_ids": [[5], [6, 7]], "min_length": 4, "exponential_decay_length_penalty": [5, 1.1],
    "suppress_tokens": [7], "begin_suppress_tokens": [8], "forced_eos_token_id": [1, 2], "top_p": 0.9, "top_k": 50,
    "renormalize_logits": True, "min_p": 0, "eta_cutoff": 0.001,
}  # fmt: skip


def test_settings_of_their_types_are_taken() -> None:
    check_types(FINE)
    shaping = shaping_of(FINE, frozenset({1}), CPU)
    assert shaping is not None
    try_out(shaping, 50, CPU)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sequence_bias", [{"a": 1}]), ("sequence_bias", [[9, -1.0]]), ("sequence_bias", [[[9], float("nan")]]),
        ("repetition_penalty", "1.1"), ("repetition_penalty", 0), ("repetition_penalty", float("inf")),
        ("no_repeat_ngram_size", True), ("bad_words_ids", [5]), ("min_length", 10**400), ("top_k", 2.5),
        ("exponential_decay_length_penalty", [5]), ("suppress_tokens", [-1]), ("top_p", 7), ("eta_cutoff", [0]),
    ],
)  # fmt: skip
def test_another_type_or_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RecipeError, match=f"generation_config: {name} is ") as caught:
        check_types({**FINE, name: value})
    assert "generation_config.json" in caught.value.hint


@pytest.mark.parametrize("settings", [{"sequence_bias": [[[90], 1.0]]}, {"forced_eos_token_id": 90}])
def test_a_token_that_the_model_has_not_is_told_before_anything_is_written(settings: dict[str, Any]) -> None:
    check_types(settings)
    shaping = shaping_of(settings, frozenset({1}), CPU)
    assert shaping is not None
    with pytest.raises(RecipeError, match="can't be followed"):
        try_out(shaping, 50, CPU)
