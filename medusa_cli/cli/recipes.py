"""`medusa recipes`: what ships to be trained with, shown and copied."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from medusa_cli.cli import options
from medusa_cli.cli.console import Console, write_result
from medusa_cli.config.catalog import find_recipe, read_header, recipes
from medusa_cli.errors import MedusaError, RecipeError

Name = Annotated[str, typer.Argument(metavar="NAME", help="A recipe's name, or a file.", show_default=False)]


def command() -> None:
    """List the recipes that ship, show one, or copy one to start from."""


def ls(output: options.Output) -> None:
    """List the recipes that ship."""
    from medusa_cli.config.loading import load_recipe

    document = [
        {"name": name, "model": load_recipe(file, surroundings={}).target.model, **asdict(read_header(_text(file)))}
        for name, file in recipes().items()
    ]
    columns = ("name", "model", "hardware", "what")
    rows = [[row["name"], row["model"], (row["hardware"] or "").rstrip("."), row["what"]] for row in document]
    console = output.console
    console.table(columns, rows, spare=("model", "hardware"), cut="what")
    console.info("medusa recipes show NAME says what it makes and costs; medusa train-heads -c NAME runs it")
    console.print_json(document, output.output_json)


def show(
    *,
    name: Name,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Every setting, with defaults and MEDUSA_* from the environment.")
    ] = False,
    output: options.Output,
) -> None:
    """Print a recipe, with its header or with every setting."""
    from medusa_cli.config.loading import load_recipe
    from medusa_cli.config.loading import resolved as written_out

    file = find_recipe(name)
    text = _text(file)
    recipe = load_recipe(file)
    console = output.console
    console.stream(written_out(recipe) if resolved else text)
    document: dict[str, Any] = {"name": file.stem, "file": file, **asdict(read_header(text))}
    console.print_json({**document, "recipe": recipe.model_dump(mode="json")}, output.output_json)


def cp(
    name: Name,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="Where to. [default: NAME.yaml here]", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite the file if it is there.")] = False,
    quiet: options.Quiet = False,
) -> None:
    """Copy a recipe to a file of your own, to change it."""
    source = find_recipe(name)
    target = file or Path(source.name)
    target = target / source.name if target.is_dir() else target
    if target.exists() and not force:
        raise RecipeError(f"{target} is there already", "name another file, or overwrite it with --force")
    write_result(target, _text(source).encode())
    Console(quiet=quiet).info(f"wrote {target}; run it with: medusa train-heads -c {target}")


SUBCOMMANDS = (ls, show, cp)


def _text(file: Path) -> str:
    """A recipe as it is written. Raises MedusaError when it can't be read."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MedusaError(f"can't read {file}: {error}", "name a readable YAML file") from error
