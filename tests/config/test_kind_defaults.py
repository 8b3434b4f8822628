"""Kinds of heads begin with settings of their own; whatever is said counts more."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from medusa_cli.config.loading import load_recipe
from medusa_cli.config.parts import HEADS, defaults_of, looks_back
from medusa_cli.config.recipe import Recipe
from medusa_cli.heads.kinds import heads_class
from medusa_cli.train.checkpoint import learning_settings


def test_a_kind_s_defaults_stand_in_where_nothing_is_said() -> None:
    recipe = load_recipe(None, (), {"heads.type": "block"})
    assert (recipe.heads.num_heads, recipe.heads.num_layers) == (6, 2)
    assert (recipe.train.learning_rate, recipe.train.place_share, recipe.train.clip) == (6e-4, 0.25, 1.0)
    assert (recipe.train.losses.ce, recipe.train.losses.l1) == (0.1, 0.9)


@pytest.mark.parametrize("text", ["heads:\n  type: block\ntrain:\n", "heads: {type: block}\n"])
def test_flags_overrides_and_files_count_more(tmp_path: Path, text: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    recipe = load_recipe(file, ("train.losses.kl=0.5", "heads.num_heads=4"), {"train.learning_rate": 0.1})
    assert (recipe.heads.num_heads, recipe.heads.num_layers) == (4, 2)
    assert recipe.train.learning_rate == 0.1
    assert (recipe.train.losses.ce, recipe.train.losses.kl) == (0.1, 0.5)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_other_kinds_begin_as_the_recipe_says(kind: str) -> None:
    assert not defaults_of(kind)
    recipe = load_recipe(None, (), {"heads.type": kind})
    assert recipe.train == Recipe().train


def holds(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether all that is wanted is there, in sections within sections too."""
    return all(
        holds(found[name], value) if isinstance(value, Mapping) else found[name] == value
        for name, value in wanted.items()
    )


def test_every_default_of_a_kind_is_a_setting() -> None:
    for kind in HEADS:
        made = load_recipe(None, (), {"heads.type": kind}).model_dump()
        for section, settings in defaults_of(kind).items():
            assert holds(made[section], settings), (kind, section)


def test_settings_that_came_later_are_said_only_where_they_change_something() -> None:
    plain = learning_settings(Recipe())["train"]
    assert not {"losses", "place_share", "clip", "states"} & set(plain)
    other = learning_settings(Recipe.model_validate({"train": {"clip": 1.0}}))["train"]
    assert other == {**plain, "clip": 1.0}


@pytest.mark.parametrize("kind", HEADS)
def test_the_table_knows_which_kinds_look_back(kind: str) -> None:
    assert looks_back(kind) == heads_class(kind).describes.looks_back
