"""`medusa recipes`, and `-c NAME`: what ships is listed, shown, copied, and run by its name."""

from pathlib import Path

import pytest
import yaml

from medusa_cli.config.catalog import recipes
from medusa_cli.config.loading import load_recipe
from tests.cli.harness import Medusa


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file here is called like a recipe."""
    monkeypatch.chdir(tmp_path)


def test_the_list_names_each_recipe_with_its_model_and_what_it_makes(medusa: Medusa) -> None:
    rows = medusa("recipes", "ls", "--json").document
    assert [row["name"] for row in rows] == list(recipes())
    (demo,) = [row for row in rows if row["name"] == "demo"]
    assert demo["model"] == "smollm2-135m"
    assert list(demo) == ["name", "model", "what", "hardware", "cost", "command", "result"]
    table = medusa("recipes", "ls").out
    assert all(name in table for name in recipes())
    assert demo["what"] in table


def test_the_list_is_of_what_ships_whatever_the_environment_says(
    medusa: Medusa, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDUSA_TARGET_MODEL", "mine")
    assert "mine" not in {row["model"] for row in medusa("recipes", "ls", "--json").document}


def test_a_recipe_is_shown_as_it_is_written(medusa: Medusa) -> None:
    done = medusa("recipes", "show", "demo")
    assert (done.code, done.out) == (0, recipes()["demo"].read_text())


def test_a_recipe_is_shown_with_every_setting(medusa: Medusa, tmp_path: Path) -> None:
    done = medusa("recipes", "show", "demo", "--resolved")
    (tmp_path / "shown.yaml").write_text(done.out)
    assert load_recipe(tmp_path / "shown.yaml") == load_recipe(recipes()["demo"])
    assert yaml.safe_load(done.out)["train"]["head_decay"] == 0.8
    document = medusa("recipes", "show", "demo", "--json").document
    assert document["recipe"]["train"]["head_decay"] == 0.8
    assert document["recipe"]["data"]["openings"]


def test_a_file_of_one_s_own_is_shown_too_and_its_faults_are_told(medusa: Medusa, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("train: {epcohs: 3}\nsede: 4\n")
    done = medusa("recipes", "show", "mine.yaml")
    assert done.code == 1
    assert "train.epcohs is no setting: did you mean train.epochs?; sede is no setting: did you mean seed?" in done.err


def test_a_recipe_is_copied_and_never_over_another(medusa: Medusa, tmp_path: Path) -> None:
    text = recipes()["demo"].read_text()
    assert medusa("recipes", "cp", "demo").code == 0
    assert (tmp_path / "demo.yaml").read_text() == text
    (tmp_path / "demo.yaml").write_text("mine")
    refused = medusa("recipes", "cp", "demo")
    assert refused.code == 1
    assert "demo.yaml is there already\n hint: name another file, or overwrite it with --force" in refused.err
    assert (tmp_path / "demo.yaml").read_text() == "mine"
    assert medusa("recipes", "cp", "demo", "--force").code == 0
    assert (tmp_path / "demo.yaml").read_text() == text


def test_a_recipe_is_copied_into_a_folder_or_to_another_name(medusa: Medusa, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert medusa("recipes", "cp", "demo", "mine").code == 0
    assert medusa("recipes", "cp", "demo", "other.yaml").err == (
        "wrote other.yaml; run it with: medusa train-heads -c other.yaml\n"
    )
    assert (tmp_path / "mine" / "demo.yaml").read_text() == (tmp_path / "other.yaml").read_text()
    nowhere = medusa("recipes", "cp", "demo", "no/such/folder.yaml")
    assert nowhere.code == 1
    assert "can't write no/such/folder.yaml" in nowhere.err


@pytest.mark.parametrize("action", ["show", "cp"])
def test_a_recipe_that_does_not_ship_is_told_with_the_nearest(action: str, medusa: Medusa) -> None:
    done = medusa("recipes", action, "demmo")
    assert done.code == 1
    assert done.err == (
        "error: no such file, and no recipe of that name: demmo\n hint: did you mean demo? see medusa recipes ls\n"
    )


def test_an_action_that_is_none_is_a_usage_error(medusa: Medusa) -> None:
    assert medusa("recipes").code == 2
    done = medusa("recipes", "lss")
    assert done.code == 2
    assert "see medusa recipes --help" in done.err


def test_a_run_takes_a_recipe_by_its_name(medusa: Medusa) -> None:
    done = medusa("train-heads", "-c", "demo", "data.rows=0")
    assert (done.code, "error: data.rows must be at least 1, not 0" in done.err) == (1, True)
    unknown = medusa("train-heads", "-c", "demmo")
    assert unknown.code == 2
    assert "did you mean demo?" in unknown.err
