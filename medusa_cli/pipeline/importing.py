"""Heads of another tool become a folder of ours: measured on text that the target writes, with a tree that fits it."""

import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from medusa_cli import __version__
from medusa_cli.config.recipe import Recipe
from medusa_cli.errors import FormatError
from medusa_cli.formats.foreign.adopting import adopted
from medusa_cli.formats.foreign.reading import Found, heads_of
from medusa_cli.formats.native import ready, write_heads
from medusa_cli.model.target import Target
from medusa_cli.pipeline.data_context import OnProgress, Stage
from medusa_cli.pipeline.data_stage import gather
from medusa_cli.pipeline.tree_fit import Fitted, OnPart, fit
from medusa_cli.train.card import FittedTree, Provenance, write_card
from medusa_cli.train.corpus import Corpus, Examples
from medusa_cli.util.files import new_folder

CHANCE = 0.02  # of the first head: below it the heads know nothing of this model


@dataclass(frozen=True)
class Telling:
    """Who is told how far it is, and what is to be known."""

    on_data: OnProgress
    on_part: OnPart
    warn: Callable[[str], None]


@dataclass(frozen=True)
class Imported:
    """The folder, what was measured, and what the heads are."""

    folder: Path
    fitted: Fitted
    layout: str
    num_heads: int
    num_layers: int
    own_output: bool


def check_place(folder: Path) -> None:
    """Raise FormatError for a place that holds something: nothing there is replaced."""
    if folder.is_dir() and any(folder.iterdir()):
        raise FormatError(f"{folder} is there and holds something", "name a new or an empty folder with -o")
    if folder.exists() and not folder.is_dir():
        raise FormatError(f"{folder} is a file", "name a new folder with -o")


def take_in(found: Found, target: Target, recipe: Recipe, folder: Path, command: str, telling: Telling) -> Imported:
    """The heads as ours in a new folder, with accuracies and a tree; after an error there is none.

    Raises FormatError, HeadsMismatch for heads of other sizes than the target's, and what the data stage raises.
    """
    check_place(folder)
    stored = adopted(heads_of(found), target)
    config = stored.config
    try:
        with new_folder(folder) as made:
            write_heads(stored, made)
            heads = ready(stored, target)
            # beside what gets the name: the states are of no use afterwards
            stage = Stage(recipe, target, made.parent / "written", telling.on_data)
            gathered = gather(stage)
            corpus = Corpus.open(gathered.store)
            examples = Examples.of(corpus, corpus.by_key(), heads.draft_ids, config.num_heads)
            fitted = fit(recipe, target, made, heads, examples, telling.on_part)
            shape = fitted.shape.spec if fitted.shape else None
            tree = FittedTree(fitted.tree.paths(), shape, fitted.choice.expected_tokens)
            counts = {"samples": corpus.num_samples, "tokens written": int(corpus.supervised_T.sum())}
            provenance = _provenance(found, target, recipe, command, counts)
            write_card(made, provenance, fitted.measurement.accuracy, tree)
    except OSError as error:
        raise FormatError(
            f"can't write {folder}: {error.strerror or error}", "free some space, or choose another folder with -o"
        ) from error
    first = fitted.measurement.accuracy.plain[0][0]
    if first < CHANCE:
        telling.warn(
            f"the first head is right at {first:.1%} of the places: these may be heads of another model, or of other "
            "weights of it"
        )
    return Imported(folder, fitted, found.layout.name, config.num_heads, config.num_layers, config.own_output)


def _provenance(found: Found, target: Target, recipe: Recipe, command: str, counts: dict[str, int]) -> Provenance:
    """How these heads came here."""
    origin = {
        "by": "the model",
        "temperature": 0.0,
        "imported from": str(found.folder),
        "format": found.layout.name,
        "base named there": found.hints.base or "none",
    }
    return Provenance(
        base=target.name,
        revision=recipe.target.revision,
        fingerprint=target.fingerprint,
        licence=target.identity.licence,
        command=command,
        recipe=recipe.model_dump(mode="json", include={"target", "data", "tree", "seed"}),
        data=counts,
        answers=origin,
        versions={"medusa-heads": __version__, "python": platform.python_version()}
        | {name: version(name) for name in (torch.__name__, "transformers")},
    )
