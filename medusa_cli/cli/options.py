"""The options every command shares, as types to annotate parameters with.

A flag that was not given is None, so that the recipe's order decides: flag > MEDUSA_* > --config > default.
The defaults live in medusa_cli.config.recipe; the help texts here read them from there.
"""

import difflib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from medusa_cli.config.catalog import find_recipe, nearest_recipe
from medusa_cli.config.parts import DRAFTERS, drafter_names
from medusa_cli.config.recipe import Recipe, Settings, TargetSettings
from medusa_cli.errors import RecipeError
from medusa_cli.util.threads import use_threads

DType = Literal["auto", "float32", "bfloat16", "float16"]
RunnerName = Literal["auto", "eager", "packed", "blocks", "compiled", "graphs"]
AttentionName = Literal["auto", "eager", "sdpa", "grouped"]


def setting(text: str, settings: type[Settings], name: str, *flags: str, metavar: str | None = None) -> Any:
    """The option of a recipe's setting, its help ending in the default; without `flags`, named as its parameter."""
    default = settings.model_fields[name].default
    help_text = text if default is None else f"{text} [default: {default}]"
    return typer.Option(*flags, metavar=metavar, help=help_text)


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


def drafter(text: str) -> Any:
    """The option --drafter."""
    return part("--drafter", text, drafter_names, DRAFTERS)


Model = Annotated[
    str | None,
    setting("An alias, a hub id, a folder or a .gguf file.", TargetSettings, "model", "--model", "-m", metavar="NAME"),
]
Heads = Annotated[
    str | None,
    typer.Option("--heads", metavar="NAME", help="A folder or hub id of heads. [default: heads known for the model]"),
]
Tree = Annotated[
    str | None, typer.Option("--tree", metavar="SPEC", help="A tree file, chain:4, 4x2x1, none, [[0],[0,0]].")
]
TreeSize = Annotated[
    int | None,
    typer.Option("--tree-size", min=0, max=1024, metavar="N", help="The best tree of N nodes for these heads."),
]
Revision = Annotated[
    str | None, typer.Option("--revision", metavar="REV", help="Branch, tag or commit of a model on the hub.")
]
Dtype = Annotated[DType | None, setting("Number format of the weights.", TargetSettings, "dtype", "--dtype")]
Device = Annotated[
    str | None, setting("Where the model runs.", TargetSettings, "device", "--device", metavar="auto|cpu|cuda[:N]|mps")
]
Runner = Annotated[RunnerName | None, setting("How a forward is launched.", TargetSettings, "runner", "--runner")]
Attention = Annotated[
    AttentionName | None, setting("Kernel of the tree attention.", TargetSettings, "attention", "--attention")
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
Speculate = Annotated[
    Literal["auto", "on", "off"],
    typer.Option(
        "--speculate", help="auto leaves guesses out while they don't pay, on makes them whatever they bring, off none."
    ),
]
Seed = Annotated[int | None, setting("Seed of all that is random.", Recipe, "seed", "--seed", metavar="N")]
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
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
OutputJson = Annotated[
    Path | None,
    typer.Option("--output-json", metavar="FILE", callback=_check_writable, help="Write the JSON document to a file."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no log; warnings and errors stay.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="More log; a traceback when something is a bug.")]


def target_values(
    *,
    model: str | None = None,
    revision: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    runner: str | None = None,
    attention: str | None = None,
    seed: int | None = None,
) -> dict[str, Any]:
    """These flags by dotted name, as `load_recipe(values=...)` takes them; None stays None: not given."""
    return {
        "target.model": model,
        "target.revision": revision,
        "target.dtype": dtype,
        "target.device": device,
        "target.runner": runner,
        "target.attention": attention,
        "seed": seed,
    }
