"""A run has one runner, whatever is remembered or measured while it is stopped, and in the processes beside it too."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from medusa_cli import assemble
from medusa_cli.config.recipe import Recipe
from medusa_cli.errors import TargetError
from medusa_cli.model.runners import autotune
from medusa_cli.pipeline.fixed_runner import laid_out_like, load_as_begun
from medusa_cli.pipeline.run_folder import open_folder
from tests.tiny_folders import save_tiny
from tests.tiny_models import quantised_model, target_of, tiny_model


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """Of a tiny model, which is measured as large ones are: packed is slow at first."""
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(autotune, "LEAST_NUMBERS", 1)
    monkeypatch.setattr(
        autotune, "layout_seconds", lambda *_, **__: autotune.Compared({"packed": 2.0, "eager": 1.0}, disturbed=False)
    )
    target = {"model": str(save_tiny(tmp_path / "model")), "dtype": "float32", "device": "cpu"}
    return Recipe(output_dir=str(tmp_path / "run"), target=target)


def test_a_run_goes_on_with_the_runner_it_began_with(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_folder(recipe, resume=True)
    target = load_as_begun(folder)
    assert target.identity.runner == "eager"
    folder.claim(target.fingerprint, target.identity.runner)
    # what was remembered is gone, and the clock says otherwise now
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "another"))
    monkeypatch.setattr(
        autotune, "layout_seconds", lambda *_, **__: autotune.Compared({"packed": 1.0, "eager": 2.0}, disturbed=False)
    )
    again = open_folder(recipe, resume=True)
    assert load_as_begun(again).identity.runner == "eager"
    again.begin_training(target.fingerprint, "eager")
    assert load_as_begun(open_folder(recipe, resume=True)).identity.runner == "eager"
    fresh = recipe.model_copy(update={"output_dir": str(tmp_path / "fresh")})
    assert load_as_begun(open_folder(fresh, resume=True)).identity.runner == "packed"


def test_a_runner_that_is_asked_for_by_name_is_taken(recipe: Recipe) -> None:
    open_folder(recipe, resume=True).claim("x", "eager")
    named = recipe.model_copy(update={"target": recipe.target.model_copy(update={"runner": "packed"})})
    assert load_as_begun(open_folder(named, resume=True)).identity.runner == "packed"


@pytest.mark.parametrize("before", ["graphs", "nonsense", "auto"])
def test_a_runner_that_can_not_be_had_here_is_found_anew(recipe: Recipe, before: str) -> None:
    open_folder(recipe, resume=True).claim("x", before)
    assert load_as_begun(open_folder(recipe, resume=True)).identity.runner == "eager"


def test_folders_that_name_no_runner_go_on(recipe: Recipe) -> None:
    folder = replace(open_folder(recipe, resume=True), found={"fingerprint": "x", "runner": 3})
    assert folder.target_settings == recipe.target


def test_a_model_that_can_not_be_loaded_is_tried_once(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def load(settings: Any) -> None:
        tried.append(settings)
        raise TargetError("no such model", "name another")

    monkeypatch.setattr(assemble, "load_target", load)
    with pytest.raises(TargetError, match="no such model"):
        load_as_begun(open_folder(recipe, resume=True))
    assert len(tried) == 1


@pytest.mark.parametrize(
    ("runner", "asked", "wanted"),
    [
        ("eager", {}, "eager"),
        ("packed", {}, "packed"),
        ("graphs", {}, "graphs"),
        ("compiled", {}, "packed"),
        ("compiled", {"runner": "compiled"}, "compiled"),
        ("eager", {"quantize": "8bit"}, "auto"),
        ("eager", {"device_map": "auto"}, "auto"),
    ],
)
def test_processes_beside_take_the_layers_as_they_lie_here(runner: str, asked: dict[str, str], wanted: str) -> None:
    target = target_of(tiny_model("llama"), "sdpa")
    target.identity = replace(target.identity, runner=runner)
    assert laid_out_like(Recipe(target=asked), target).target.runner == wanted


def test_beside_a_compiled_forward_over_few_bits_layers_are_blocks() -> None:
    target = target_of(quantised_model(), runner="auto")
    if target.identity.runner != "blocks":
        pytest.skip("no compiler")
    target.identity = replace(target.identity, runner="compiled")
    assert laid_out_like(Recipe(), target).target.runner == "blocks"
