"""A run as typed settings: read from YAML, overridden from the command line, every fault named at once.

This file knows no model and no torch. Defaults live here and nowhere else.
"""

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from medusa_cli.errors import RecipeError


def _steering(name: str) -> tuple[str, ...]:
    """The openings or topics that come with the package."""
    file = Path(__file__).parent / "data" / "steering.yaml"
    return tuple(yaml.safe_load(file.read_text(encoding="utf-8"))[name])


COLDEST = 1e-6  # logits divided by less are no numbers any more


class Settings(BaseModel):
    """Base of all settings: unknown names are faults, and settings don't change once made."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


class TargetSettings(Settings):
    """Which model, and how it is held."""

    model: str = "smollm2-135m"
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$")
    runner: Literal["auto", "eager", "packed", "blocks", "compiled"] = "auto"
    attention: Literal["auto", "eager", "sdpa", "grouped"] = "auto"


class HeadsSettings(Settings):
    """The shape of the heads."""

    type: Literal["medusa"] = "medusa"
    num_heads: int = Field(4, ge=1, le=16)
    num_layers: int = Field(1, ge=1, le=8)
    draft_vocab: int = Field(8192, ge=0, description="entries of the narrowed draft vocabulary; 0 keeps all")
    sees_root: bool = Field(True, description="show the heads the token that is already decided")
    stored: Literal["float32", "bfloat16", "float16"] = "float16"
    own_output: bool = Field(False, description="give the heads an output matrix of their own")


class DataSettings(Settings):
    """Where prompts and answers come from."""

    dataset: str = Field("self", description="self, a file (.jsonl, .json, .parquet, .txt) or a hub id")
    dataset_split: str = "train"
    num_samples: int = Field(2000, ge=1)
    max_seq_length: int = Field(512, ge=16, description="tokens of prompt and answer together")
    max_prompt_tokens: int = Field(96, ge=1, description="longest prompt the target writes for itself")
    max_answer_tokens: int = Field(192, ge=1)
    prompt_temperature: float = Field(1.0, ge=COLDEST)
    prompt_top_p: float = Field(0.95, gt=0, le=1)
    rows: int = Field(96, ge=1, description="rows decoded side by side while the target writes")
    workers: int = Field(1, ge=1, description="processes that write side by side, each with a copy of the model")
    held_out: float = Field(0.03, gt=0, lt=0.5, description="share of the samples kept for measuring")
    openings: tuple[str, ...] = Field(
        default_factory=lambda: _steering("openings"),
        min_length=1,
        description="task openings that steer the prompts the target writes",
    )
    topics: tuple[str, ...] = Field(
        default_factory=lambda: _steering("topics"), min_length=1, description="put where an opening says {topic}"
    )


class TrainSettings(Settings):
    """How the heads learn."""

    epochs: float = Field(2.0, gt=0)
    max_steps: int | None = Field(None, ge=1)
    batch_size: int = Field(2048, ge=1, description="supervised positions in a step")
    learning_rate: float = Field(1e-3, gt=0)
    warmup_ratio: float = Field(0.03, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    head_decay: float = Field(0.8, gt=0, le=1, description="weight of head k's loss is head_decay ** k")
    loss_chunk: int = Field(512, ge=1, description="positions projected to the draft vocabulary at once")
    eval_steps: int = Field(100, ge=1)
    save_steps: int = Field(100, ge=1)
    report_to: Literal["none", "wandb"] = "none"


class TreeSettings(Settings):
    """The tree fitted after training."""

    size: int | None = Field(None, ge=0, description="nodes without the root; none: chosen from the measured costs")
    max_size: int = Field(63, ge=0)


class Recipe(Settings):
    """Everything a training run needs to know."""

    target: TargetSettings = TargetSettings()
    heads: HeadsSettings = HeadsSettings()
    data: DataSettings = DataSettings()
    train: TrainSettings = TrainSettings()
    tree: TreeSettings = TreeSettings()
    seed: int = Field(0, gt=-(2**62), lt=2**62)
    output_dir: str = "runs/heads"


SECTIONS = ("target", "heads", "data", "train", "tree")


def load_recipe(file: Path | None, overrides: Iterable[str] = (), values: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe in `file`, with `MEDUSA_*` from the environment, `a.b=value` overrides and `values` on top.

    values   flags by dotted name; None means the flag was not given. Raises RecipeError naming every fault.
    """
    tree = _read_yaml(file) if file else {}
    _put_all(tree, (_split_override(text) for text in overrides))
    _put_all(tree, _from_environment(os.environ))
    _put_all(tree, ((name, value) for name, value in (values or {}).items() if value is not None))
    try:
        return Recipe.model_validate(_numbers(tree))
    except ValidationError as error:
        raise _faults(error, file) from error


def _read_yaml(file: Path) -> dict[str, Any]:
    """The mapping in a YAML file, or RecipeError."""
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
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
    return tree


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
    """MEDUSA_TRAIN_EPOCHS=3 sets train.epochs; the names are those of the recipe, and only those."""
    for name in _all_names():
        key = f"MEDUSA_{name}".replace(".", "_").upper()
        if key in environment and name not in SECTIONS:
            yield name, _yaml_value(environment[key], f"{key} in the environment")


def _put_all(tree: dict[str, Any], items: Iterable[tuple[str, Any]]) -> None:
    """Set dotted names in a nested mapping."""
    for dotted, value in items:
        *sections, last = dotted.split(".")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})
            if not isinstance(at, dict):
                raise RecipeError(f"'{dotted}': '{section}' is no section", f"sections are {', '.join(SECTIONS)}")
        at[last] = value


def _numbers(value: Any) -> Any:
    """YAML 1.1 reads 1e-4 as text: turn such text into the number it means."""
    if isinstance(value, dict):
        return {key: _numbers(inner) for key, inner in value.items()}
    if isinstance(value, str) and "e" in value.lower() and value.strip()[:1] in "+-.0123456789":
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _faults(error: ValidationError, file: Path | None) -> RecipeError:
    """All faults on one line each, with the nearest known name for unknown ones."""
    lines = []
    for fault in error.errors():
        name = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            near = difflib.get_close_matches(name, _all_names(), n=1, cutoff=0.5)
            lines.append(f"{name} is no setting" + (f": did you mean {near[0]}?" if near else ""))
        else:
            lines.append(f"{name}: {fault['msg']} (got {fault['input']!r})")
    where = f"{file}: " if file else ""
    return RecipeError(where + "; ".join(lines), "see recipes/ for the settings and their defaults")


def _all_names(model: type[Settings] = Recipe, prefix: str = "") -> list[str]:
    """Dotted names of every setting."""
    names = []
    for name, field in model.model_fields.items():
        names.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            names += _all_names(field.annotation, f"{prefix}{name}.")
    return names
