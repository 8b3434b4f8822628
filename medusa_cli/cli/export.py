"""`medusa export`: heads as another tool reads them, read back by its own steps and compared."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from medusa_cli.cli import options
from medusa_cli.cli.console import GateFailed

if TYPE_CHECKING:
    from medusa_cli.pipeline.exporting import Exported


def command(
    *,
    to: Annotated[
        Literal["fasterdecoding", "trtllm", "tgi", "vllm", "medusa2"],
        typer.Option("--to", help="The tool that is to read them; medusa2: the model's files with heads beside them."),
    ],
    output_dir: Annotated[
        Path, typer.Option("--output-dir", "-o", metavar="DIR", help="The folder to write; it must be new or empty.")
    ],
    heads: options.Heads = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify",
            help="Read the folder back as the tool does and compare draft logits on real states.",
        ),
    ] = True,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace an earlier export, and write several layers where the tool ties them."),
    ] = False,
    target: options.Target,
    threads: options.Threads = None,
    config: options.Config = None,
    output: options.Output,
) -> None:
    """Write heads as another tool reads them, with the command that serves them; what it can't hold is refused."""
    from medusa_cli.config.loading import load_recipe
    from medusa_cli.util.paths import expanded

    settings = load_recipe(config, (), target).target
    console, folder = output.console, expanded(str(output_dir))
    from medusa_cli.assemble import DrafterChoice, adapter_of, heads_folder, load_target
    from medusa_cli.errors import FormatError
    from medusa_cli.pipeline.exporting import Differs, Wish, check_place, export
    from medusa_cli.registry import read_heads

    check_place(folder, force)
    source = heads_folder(DrafterChoice(None, heads), settings.model)
    if source is None:
        raise FormatError(f"no heads are known for {settings.model}", "name some with --heads")
    with console.waiting(f"loading {settings.model}"):
        loaded = load_target(settings, adapter_of(source))
    found = read_heads(source, loaded)
    try:
        with console.waiting(f"writing {folder}"):
            made = export(found, source, loaded, settings, Wish(to, folder, verify, force))
    except Differs as error:
        raise GateFailed(error.message, error.hint) from error
    for note in made.notes:
        console.info(f"note: {note}")
    _show(made, console)
    console.print_json(_document(made, to, str(source), loaded.name), output.output_json)


def _show(made: "Exported", console: Any) -> None:
    """Files, proof and the command."""
    console.table(("file", "bytes"), list(made.files.items()))
    if made.verified:
        seen = made.verified
        console.say(
            f"verified: draft logits at {seen.positions} positions differ by {seen.largest_difference:.2g} at most, of "
            f"{seen.largest_logit:.3g}"
        )
    console.say(f"serve: {made.command}")


def _document(made: "Exported", to: str, heads: str, model: str) -> dict[str, Any]:
    """The export as one JSON document."""
    return {
        "model": model,
        "heads": heads,
        "format": to,
        "output_dir": str(made.folder),
        "files": made.files,
        "notes": made.notes,
        "verified": made.verified,
        "command": made.command,
    }
