"""Settings of replicas, as `serve run` and `medusa serve --ray` give them. No Ray here."""

from pathlib import Path

import pytest

from medusa_cli.config.recipe import TargetSettings
from medusa_cli.errors import RecipeError
from medusa_cli.serve.ray_app import RaySettings, RunSettings, checked, spread_of
from tests.tiny_folders import save_tiny


def test_replicas_are_a_number_or_the_least_and_the_most() -> None:
    assert spread_of("3") == (3, 3)
    assert spread_of("2..8") == (2, 8)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("replicas", "8..2", "the least first"),
        ("replicas", "many", "a number of replicas"),
        ("max_num_seqs", "0", "max_num_seqs"),
        ("timeout", "soon", "timeout"),
        ("modle", "smollm2-135m", "modle"),
        ("target", TargetSettings(device="cuda:1"), "write device cuda"),
    ],
)
def test_a_wrong_setting_is_told_by_name(name: str, value: object, told: str) -> None:
    with pytest.raises(RecipeError, match=told) as error:
        checked(RunSettings, {name: value})
    assert "replicas" in error.value.hint


def test_words_of_a_command_line_become_settings() -> None:
    given = {"replicas": "2..4", "max_num_seqs": "3", "timeout": "5", "cpus": "0.25", "metrics": "false"}
    found = checked(RunSettings, given)
    assert (found.max_num_seqs, found.timeout, found.cpus, found.metrics) == (3, 5.0, 0.25, False)


def test_settings_travel_as_plain_values_and_name_folders_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    settings = RaySettings(target=TargetSettings(model="tiny"), draft_model="smollm2-135m", replicas="2")
    sent = settings.anywhere()
    assert sent.target.model == str(tmp_path / "tiny")
    assert sent.draft_model == "smollm2-135m"
    assert RaySettings.model_validate(sent.model_dump(mode="json")) == sent
