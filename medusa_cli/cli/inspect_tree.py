"""`medusa inspect-tree`: draw a tree, and say what it and other sizes are worth."""

import json as json_module
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from medusa_cli.cli import options
from medusa_cli.cli.console import Console, write_result
from medusa_cli.errors import TreeError
from medusa_cli.formats.places import find_heads
from medusa_cli.recipe import TargetSettings
from medusa_cli.trees import picture, render

if TYPE_CHECKING:
    from medusa_cli.trees.files import Measured
    from medusa_cli.trees.report import Inspection

Format = Literal["text", "json", "dot", "svg", "png", "medusa-choices"]
_BY_SUFFIX: dict[str, Format] = {".json": "json", ".dot": "dot", ".gv": "dot", ".svg": "svg", ".png": "png"}


def command(
    model: options.Model = None,
    heads: options.Heads = None,
    tree: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|SPEC",
            help="Another tree: chain:4, 4x2x1, none, [[0],[0,0]], a tree.json, a folder or a medusa-choices file.",
        ),
    ] = None,
    tree_size: options.TreeSize = None,
    format: Annotated[
        Format | None, typer.Option("--format", help="How to draw. [default: from the name of --output, else text]")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the drawing to a file; png needs one.")
    ] = None,
    compare: Annotated[
        tuple[str, str] | None, typer.Option(metavar="A B", help="Two trees, each a FILE or SPEC, side by side.")
    ] = None,
    json: options.Json = False,
    output_json: options.OutputJson = None,
    quiet: options.Quiet = False,
) -> None:
    """Draw a tree with what each node gains, and a table of what each size gains and costs."""
    drawn = format or _BY_SUFFIX.get(output.suffix.lower() if output else "", "text")
    _check_usage(drawn, format, output, compare is not None, tree, tree_size, json)
    from medusa_cli.trees import report

    folder = find_heads(heads, model or TargetSettings().model)
    measured = _measured(folder)
    width = max(60, min(shutil.get_terminal_size((80, 24)).columns, 120))
    if compare:
        a, b = (_inspect(folder, measured, spec, None) for spec in compare)
        document = report.comparison_document(a, b)
        drawing: str | bytes = report.comparison_page(a, b, width)
    else:
        inspection = _inspect(folder, measured, tree, tree_size)
        document = report.document(inspection)
        drawing = _draw(inspection, drawn, width)
    console = Console(json=json, quiet=quiet)
    if output:
        write_result(output, drawing if isinstance(drawing, bytes) else drawing.encode())
        console.info(f"wrote {output}")
    else:
        assert isinstance(drawing, str)
        console.stream(drawing)
    console.print_json(document, output_json)


def _check_usage(
    drawn: Format, format: Format | None, output: Path | None, comparing: bool, tree: Any, tree_size: Any, json: bool
) -> None:
    """Refuse flags that contradict each other."""
    if tree is not None and tree_size is not None:
        raise typer.BadParameter("--tree and --tree-size both say which tree; give one")
    if comparing and (tree is not None or tree_size is not None):
        raise typer.BadParameter("--compare names its two trees; leave out --tree and --tree-size")
    if comparing and drawn != "text":
        raise typer.BadParameter("--compare is text; --json gives it as a document")
    if drawn == "png" and output is None:
        raise typer.BadParameter("--format png needs --output FILE")
    if json and format and output is None:
        raise typer.BadParameter("--json and --format both want stdout; give --output FILE for the drawing")


def _measured(folder: Path | None) -> "Measured | None":
    """The accuracies of the heads in `folder`, if there is one."""
    from medusa_cli.trees.files import read_measured

    return read_measured(folder) if folder else None


def _inspect(folder: Path | None, measured: "Measured | None", spec: str | None, tree_size: int | None) -> "Inspection":
    """The tree that the flags name, with what was measured."""
    from medusa_cli.trees.build import best_tree
    from medusa_cli.trees.dynamic import DynamicShape
    from medusa_cli.trees.files import parse_tree, read_shape, read_tree
    from medusa_cli.trees.report import Inspection

    if spec is not None:
        return Inspection(f"tree {spec}", parse_tree(spec), measured)
    if measured is None or folder is None:
        raise TreeError("no tree is named and no heads are at hand", "name one with --tree, or heads with --heads")
    if tree_size is not None:
        fitted = best_tree(measured.conditional_KR, tree_size)
        return Inspection(f"best tree of up to {tree_size} nodes for {folder}", fitted, measured)
    tree, shape = read_tree(folder), read_shape(folder)
    instead = f", where decoding uses {shape.spec}" if isinstance(shape, DynamicShape) else ""
    return Inspection(f"fixed tree of {folder}{instead}" if instead else f"tree of {folder}", tree, measured)


def _draw(inspection: "Inspection", drawn: Format, width: int) -> str | bytes:
    """The tree in the format asked for."""
    from medusa_cli.trees.report import page

    if drawn == "text":
        return page(inspection, width)
    if drawn == "json":
        return json_module.dumps(render.to_json(inspection.nodes), indent=2) + "\n"
    if drawn == "png":
        return picture.to_png(inspection.nodes)
    if drawn == "svg":
        return picture.to_svg(inspection.nodes)
    return (render.to_dot if drawn == "dot" else render.to_choices)(inspection.nodes) + "\n"
