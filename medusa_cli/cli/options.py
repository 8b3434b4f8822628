"""The options every command shares, as types to annotate parameters with.

A flag that was not given is None, so that the recipe's order decides: flag > MEDUSA_* > --config > default.
The settings' types, help and defaults live in medusa_cli.config.recipe.
"""

import difflib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from medusa_cli.cli.console import Console
from medusa_cli.cli.flags import RecipeFlags
from medusa_cli.config.catalog import find_recipe, nearest_recipe
from medusa_cli.config.parts import DRAFTERS, FUNCTION, MIXED, drafter_names, drafter_part
from medusa_cli.errors import RecipeError
from medusa_cli.util.threads import use_threads

if TYPE_CHECKING:
    from medusa_cli.assemble import DrafterChoice


def _check_writable(file: Path | None) -> Path | None:
    """Refuse, before any work is done, a file that could not be written after it."""
    if file is not None and (file.is_dir() or not os.access(file.absolute().parent, os.W_OK)):
        raise typer.BadParameter(f"can't write {file}")
    return file


def _use_threads(count: int | None) -> int | None:
    """Take the number over before the command imports what computes."""
    if count is not None:
        use_threads(count)
    return count


def _find_recipe(name: str) -> Path:
    """The file of a recipe named by the user."""
    try:
        return find_recipe(name)
    except RecipeError as error:
        near = nearest_recipe(name)
        raise typer.BadParameter(error.message + (f" Did you mean {near}?" if near else "")) from error


def part(flag: str, text: str, names: Callable[[], list[str]], shown: Iterable[str]) -> Any:
    """The option that names a part, which other packages may have brought; `shown`: those of this program."""

    def known(name: str | None) -> str | None:
        if name is not None and name not in names():
            near = difflib.get_close_matches(name, names(), n=1)
            meant = f" Did you mean {near[0]}?" if near else ""
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(names())}.{meant}")
        return name

    return typer.Option(flag, metavar=f"<{'|'.join(shown)}>", help=text, callback=known, autocompletion=names)


def drafter(text: str, names: Callable[[], list[str]] = drafter_names) -> Any:
    """The option --drafter; `names`: those that can be completed."""

    def known(name: str | None) -> str | None:
        try:
            found = drafter_part(name)
        except RecipeError as error:
            raise typer.BadParameter(f"{error.message}; {error.hint}") from error
        if name is not None and not found.guesses and name not in names():
            raise typer.BadParameter(f"{name!r} guesses nothing: use one of {', '.join(names())}")
        return name

    shown = ", ".join(name for name in DRAFTERS if name in names())
    text = f"{text} Names: {shown}, {FUNCTION}package.module:function, {MIXED}:a,b"
    return typer.Option("--drafter", metavar="NAME", help=text, callback=known, autocompletion=names)


_TARGET = ("target.model", "target.revision", "target.dtype", "target.device", "target.runner", "target.attention")
_METAVARS = {"model": "NAME", "revision": "REV", "device": "auto|cpu|cuda[:N]|mps"}
Target = Annotated[dict[str, Any], RecipeFlags(*_TARGET, metavars=_METAVARS)]
Seeded = Annotated[dict[str, Any], RecipeFlags(*_TARGET, "seed", metavars=_METAVARS)]
Heads = Annotated[
    str | None,
    typer.Option("--heads", metavar="NAME", help="A folder or hub id of heads. [default: heads known for the model]"),
]
TreeSize = Annotated[
    int | None,
    typer.Option("--tree-size", min=0, max=1024, metavar="N", help="The best tree of N nodes for these heads."),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        max=4096,
        metavar="N",
        callback=_use_threads,
        help="Threads of a CPU that compute. [default: OMP_NUM_THREADS, else one for each core]",
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="NAME|FILE",
        parser=_find_recipe,
        help="A recipe: one that ships, by name, or settings in a YAML file.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings over those of --config: train.epochs=3", show_default=False),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no log; warnings and errors stay.")]


@dataclass(frozen=True)
class Output:
    """Where results go, and how much is said meanwhile."""

    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")] = False
    output_json: Annotated[
        Path | None,
        typer.Option(
            "--output-json", metavar="FILE", callback=_check_writable, help="Write the JSON document to a file."
        ),
    ] = None
    quiet: Quiet = False
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="More log; a traceback when something is a bug.")] = (
        False
    )

    @property
    def console(self) -> Console:
        """What the command prints with."""
        return Console(json=self.json, quiet=self.quiet, verbose=self.verbose)


@dataclass(frozen=True)
class Guessing:
    """Who guesses, and in which tree."""

    heads: Heads = None
    tree: Annotated[
        str | None, typer.Option("--tree", metavar="SPEC", help="A tree file, chain:4, 4x2x1, none, [[0],[0,0]].")
    ] = None
    tree_size: TreeSize = None
    speculate: Annotated[
        Literal["auto", "on", "off"],
        typer.Option(
            "--speculate",
            help="auto leaves guesses out while they don't pay, on makes them whatever they bring, off none.",
        ),
    ] = "auto"
    draft_model: Annotated[
        str | None,
        typer.Option("--draft-model", metavar="NAME", help="The model that guesses: for model and llama-cpp."),
    ] = None
    drafter_errors: Annotated[
        Literal["warn", "raise"],
        typer.Option("--drafter-errors", help="A function that fails: warn goes on without it, raise stops."),
    ] = "warn"

    suffix_memory: Annotated[
        Path | None,
        typer.Option(
            "--suffix-memory",
            metavar="FILE",
            help="Copy from earlier replies of this model too, kept in FILE, which grows with each reply.",
        ),
    ] = None

    def choice(self, drafter: str | None) -> "DrafterChoice":
        """What was asked for, with the drafter of this name."""
        from medusa_cli.assemble import DrafterChoice
        from medusa_cli.drafters.source import Wishes

        wishes = Wishes(self.draft_model, self.drafter_errors, self.suffix_memory)
        return DrafterChoice(drafter, self.heads, self.tree, self.tree_size, self.speculate, wishes)
