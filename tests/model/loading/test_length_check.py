"""The self-check crosses every length that a config names, with rows of different length, and finds what changes."""

import copy
from typing import Any

import pytest

from medusa_cli.errors import TargetError
from medusa_cli.model.loading import length_check
from medusa_cli.model.loading.length_check import crossings
from medusa_cli.model.loading.self_check import require, self_check
from medusa_cli.model.rotary import RotaryTables
from medusa_cli.model.thresholds import thresholds
from tests import tiny_folders
from tests.laws.test_length_law import MODELS, model_of
from tests.tiny_models import ARCHITECTURES, target_of, tiny_model

LOCAL = {"attention_types": [[["global", "local"], 1]], "window_size": 40, "num_heads": 4, "num_layers": 2}


def gpt_neo(**changes: Any) -> Any:
    settings = {**LOCAL, "vocab_size": 97, "hidden_size": 32, "max_position_embeddings": 96, **changes}
    return tiny_folders.tiny_model("gpt_neo", **settings)


def test_a_config_s_thresholds_are_found_by_what_it_calls_them() -> None:
    assert thresholds(model_of("phi3, longrope").config) == {
        "original_max_position_embeddings": 24,
        "max_position_embeddings": 96,
    }
    assert thresholds(gpt_neo().config) == {"window_size": 40, "max_position_embeddings": 96}
    assert thresholds(tiny_model("mistral").config) == {"sliding_window": 8, "max_position_embeddings": 96}


@pytest.mark.parametrize("name", MODELS)
def test_tables_that_change_pass_and_are_crossed(name: str) -> None:
    target = target_of(model_of(name))
    crossed, left = crossings(target)
    assert 24 in [each.length for each in crossed]
    assert not left
    assert self_check(target).ok


@pytest.mark.parametrize("name", MODELS)
def test_tables_chosen_by_the_longest_row_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RotaryTables, "vary", False)
    target = target_of(model_of(name))
    result = self_check(target)
    assert not result.ok
    assert result.worst is not None
    with pytest.raises(TargetError, match=r"past \w*max_position_embeddings \(24 tokens\) of its config"):
        require(target, result)


def test_keys_that_are_not_read_anew_are_found() -> None:
    target = target_of(model_of("phi3, longrope"))
    target.tables.turns = []
    assert not self_check(target).ok


def test_a_window_in_words_of_an_architecture_s_own_is_refused_by_that_word() -> None:
    target = target_of(gpt_neo())
    with pytest.raises(TargetError, match=r"gpt_neo.* past window_size \(40 tokens\) of its config"):
        require(target, self_check(target))


def test_a_window_shorter_than_the_check_is_named_and_no_cure_is_promised() -> None:
    with pytest.raises(TargetError, match=r"gpt_neo.* can't verify a tree") as caught:
        require(short := target_of(gpt_neo(window_size=12)), self_check(short))
    assert "window_size (12 tokens)" in caught.value.hint
    assert "--runner" not in caught.value.hint


def test_a_window_that_no_layer_has_is_no_reason_to_refuse() -> None:
    assert self_check(target_of(gpt_neo(attention_types=[[["global"], 2]]))).ok


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_every_architecture_that_is_verified_crosses_what_its_config_names(name: str) -> None:
    result = self_check(target_of(tiny_model(name)))
    assert result.ok, result


def test_what_would_take_too_long_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_check, "ALWAYS", 4)
    monkeypatch.setattr(length_check, "PATIENCE_S", 0.0)
    assert self_check(target_of(tiny_model("mistral"))).uncrossed == ["sliding_window (8 tokens)"]


def test_the_model_s_own_generation_config_stays_and_ends_nothing() -> None:
    model = copy.deepcopy(tiny_model("mistral"))
    model.generation_config.eos_token_id = list(range(97))
    model.generation_config.repetition_penalty = 1.7
    target = target_of(model)
    assert self_check(target).ok
    assert target.model.generation_config.repetition_penalty == 1.7
