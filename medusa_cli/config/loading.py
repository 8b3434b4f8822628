"""Recipes out of text and into it: YAML files, overrides, flags and the environment; every fault named at once.

Knows no setting by itself: what there is, and its defaults, stands in config/recipe.py.
"""

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from medusa_cli.config.messages import in_words
from medusa_cli.config.recipe import DataSettings, Recipe
from medusa_cli.config.settings import Settings
from medusa_cli.errors import RecipeError

SECTIONS = ("target", "heads", "data", "train", "tree", "lora")


def load_recipe(
    file: Path | None,
    overrides: Iterable[str] = (),
    values: Mapping[str, Any] | None = None,
    surroundings: Mapping[str, str] | None = None,
) -> Recipe:
    """The recipe in `file`, with `MEDUSA_*` from the environment, `a.b=value` overrides and `values` on top.

    values        flags by dotted name; None means the flag was not given
    surroundings  the environment to read; None: the process's own

    Raises RecipeError naming every fault.
    """
    tree, twice = _read_yaml(file) if file else ({}, [])
    on_top = [
        *(_split_override(text) for text in overrides),
        *_from_environment(os.environ if surroundings is None else surroundings),
        *((name, value) for name, value in (values or {}).items() if value is not None),
    ]
    _put_all(tree, on_top)
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        fields = all_fields()
        patterns = {name: field.description or "" for name, field in fields.items()}
        faults = error.errors()
        given = {name for name, _ in on_top}
        of_the_file = twice or any(".".join(map(str, fault["loc"])) not in given for fault in faults)
        raise _fault([*twice, *in_words(faults, patterns, fields)], file if of_the_file else None) from error
    if twice:
        raise _fault(twice, file)
    return recipe


def resolved(recipe: Recipe) -> str:
    """The recipe as YAML with every setting written out; steering that is the package's own is left out."""
    settings = recipe.model_dump(mode="json")
    own = DataSettings()
    for name in ("openings", "topics"):
        if getattr(recipe.data, name) == getattr(own, name):
            del settings["data"][name]
    return str(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=120))


def all_fields(model: type[Settings] = Recipe, prefix: str = "") -> dict[str, FieldInfo]:
    """Every setting and section by its dotted name."""
    fields = {}
    for name, field in model.model_fields.items():
        fields[prefix + name] = field
        for kind in (field.annotation, *get_args(field.annotation)):  # a section may be left out: Section | None
            if isinstance(kind, type) and issubclass(kind, Settings):
                fields |= all_fields(kind, f"{prefix}{name}.")
    return fields


def _fault(sentences: Iterable[str], file: Path | None) -> RecipeError:
    where = f"{file}: " if file else ""
    return RecipeError(where + "; ".join(sentences), "see recipes/ for the settings and their defaults")


class _Loader(yaml.SafeLoader):
    """Notes the keys a mapping gives twice, of which YAML keeps the last without a word."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.twice: dict[int, str] = {}

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """The mapping in a node."""
        seen = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if str(key.value) in seen:
                self.twice[key.start_mark.line + 1] = str(key.value)
            seen.add(str(key.value))
        return dict(super().construct_mapping(node, deep))


def _read_yaml(file: Path) -> tuple[dict[str, Any], list[str]]:
    """The mapping in a YAML file and a sentence for each key given twice, or RecipeError."""
    try:
        loader = _Loader(file.read_text(encoding="utf-8"))
        tree = loader.get_single_data()
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"can't read the recipe {file}: {error}", "name a readable YAML file") from error
    except yaml.YAMLError as error:
        place = getattr(error, "problem_mark", None)
        where = f", line {place.line + 1}" if place else ""
        raise RecipeError(f"{file}{where}: this is not YAML", "see recipes/ for working examples") from error
    except (ValueError, RecursionError) as error:  # a date that is none, brackets without end
        raise RecipeError(f"{file} can't be read: {error}", "see recipes/ for working examples") from error
    if not isinstance(tree, dict):
        raise RecipeError(f"{file} holds no settings", "see recipes/ for working examples")
    return tree, [f"{name} is given twice (line {line})" for line, name in sorted(loader.twice.items())]


def _split_override(text: str) -> tuple[str, Any]:
    """`train.epochs=3` as a dotted name and a YAML value."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise RecipeError(f"override '{text}' is not of the form name=value", "for example train.epochs=3")
    return name, _yaml_value(value, f"override '{text}'") if value else None


def _yaml_value(text: str, where: str) -> Any:
    """One YAML value, or RecipeError."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(f"{where}: the value is not YAML", "put quotes around text that looks like YAML") from error


def _from_environment(environment: Mapping[str, str]) -> Iterable[tuple[str, Any]]:
    """MEDUSA_TRAIN_EPOCHS=3 sets train.epochs. Raises RecipeError for a name of a section that has no such setting."""
    names = {f"MEDUSA_{name}".replace(".", "_").upper(): name for name in all_fields() if name not in SECTIONS}
    for key in sorted(environment):
        if key in names:
            yield names[key], _yaml_value(environment[key], f"{key} in the environment")
        elif key.startswith("MEDUSA_"):
            _refuse_misspelt(key, names)


def _refuse_misspelt(key: str, names: Iterable[str]) -> None:
    """Raise RecipeError for a variable that can only be meant as a setting; others may be another program's."""
    sections = tuple(f"MEDUSA_{section}_".upper() for section in SECTIONS)
    near = difflib.get_close_matches(key, names, n=2, cutoff=0.6 if key.startswith(sections) else 0.8)
    if near or key.startswith(sections):
        hint = (
            f"did you mean {' or '.join(near)}?"
            if near
            else f"unset {key}; settings are named as MEDUSA_TRAIN_EPOCHS is"
        )
        raise RecipeError(f"{key} in the environment is no setting", hint)


def _put_all(tree: dict[str, Any], items: Iterable[tuple[str, Any]]) -> None:
    """Set dotted names in a nested mapping."""
    for dotted, value in items:
        *sections, last = dotted.split(".")
        at = tree
        for section in sections:
            if at.get(section) is None:  # a section without a line is null
                at[section] = {}
            at = at[section]
            if not isinstance(at, dict):
                raise RecipeError(f"'{dotted}': '{section}' is no section", f"sections are {', '.join(SECTIONS)}")
        at[last] = value
