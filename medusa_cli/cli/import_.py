"""`medusa import`: heads of another tool become ours, measured on the model's own words, with a tree that fits."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from medusa_cli.cli import options
from medusa_cli.cli.console import Console
from medusa_cli.cli.flags import RecipeFlags
from medusa_cli.config.loading import load_recipe

if TYPE_CHECKING:
    from medusa_cli.pipeline.importing import Imported

SAMPLES = 64  # texts that the heads are measured on, where nobody says how many
_WRITING = RecipeFlags("data.num_samples", "data.max_seq_length", "tree.size", words={"tree.size": "tree_size"})


def command(
    *,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A folder or hub id of heads.", show_default=False)],
    overrides: options.Overrides = None,
    output_dir: Annotated[
        Path, typer.Option("--output-dir", "-o", metavar="DIR", help="The folder to write; it must be new or empty.")
    ],
    format: Annotated[
        Literal["auto", "fasterdecoding", "medusa2", "modelopt", "vllm"],
        typer.Option("--format", help="Whose heads they are; auto tells by the names of the tensors."),
    ] = "auto",
    writing: Annotated[dict[str, Any], _WRITING],
    target: options.Seeded,
    threads: options.Threads = None,
    config: options.Config = None,
    output: options.Output,
) -> None:
    """Take in heads that another tool trained: FasterDecoding, TGI, TensorRT-LLM, ModelOpt or vLLM."""
    from medusa_cli.cli.signals import Stops
    from medusa_cli.cli.training_progress import Watch
    from medusa_cli.formats.places import find_heads
    from medusa_cli.util.paths import expanded

    console, folder = output.console, expanded(str(output_dir))
    from medusa_cli.assemble import load_target
    from medusa_cli.formats.foreign.reading import find_foreign
    from medusa_cli.pipeline.importing import Telling, check_place, take_in

    check_place(folder)
    place = find_heads(source, "")
    assert place is not None
    found = find_foreign(place, None if format == "auto" else format)
    named = {"data.num_samples": SAMPLES} if config is None else {}
    recipe = load_recipe(
        config, [*(f"{name}={value}" for name, value in named.items()), *(overrides or ())], writing | target
    )
    base = str(place) if found.layout.beside_model and found.hints.of_model else found.hints.base
    if base and not _names_model(target, config):
        console.info(f"the model is the one that these heads name: {base}")
        recipe = recipe.model_copy(update={"target": recipe.target.model_copy(update={"model": base})})
    with console.waiting(f"loading {recipe.target.model}"):
        loaded = load_target(recipe.target)
    with Stops() as stops, Watch(console, None, stops) as hooks:
        telling = Telling(hooks.on_data, hooks.on_part, console.warn)
        made = take_in(found, loaded, recipe, folder, shlex.join(["medusa", *sys.argv[1:]]), telling)
    _show(made, console)
    console.print_json(_document(made, source, loaded.name), output.output_json)


def _names_model(target: dict[str, Any], config: Path | None) -> bool:
    """Whether the user says which model it is."""
    import os

    return target["target.model"] is not None or config is not None or bool(os.environ.get("MEDUSA_TARGET_MODEL"))


def _show(made: "Imported", console: Console) -> None:
    """What was found, how right the heads are, and the tree."""
    accuracy, choice = made.fitted.measurement.accuracy, made.fitted.choice
    output = "outputs of their own" if made.own_output else "the model's output"
    console.say(f"{made.layout}: {made.num_heads} heads of {made.num_layers} blocks, {output}")
    rows = [
        (f"head {head + 1}", plain[0], sum(plain[:5]), given[0])
        for head, (plain, given) in enumerate(zip(accuracy.plain, accuracy.conditional, strict=True))
    ]
    console.table(("", "plain top-1", "plain top-5", "conditional top-1"), rows, title=f"{accuracy.positions:,} places")
    console.say(f"tree: {choice.size} nodes, {choice.expected_tokens:.2f} tokens a step expected")
    console.say(f"heads: {made.folder}")


def _document(made: "Imported", source: str, model: str) -> dict[str, Any]:
    """The import as one JSON document."""
    return {
        "model": model,
        "source": source,
        "format": made.layout,
        "output_dir": str(made.folder),
        "num_heads": made.num_heads,
        "num_layers": made.num_layers,
        "own_output": made.own_output,
        **made.fitted.document,
    }
