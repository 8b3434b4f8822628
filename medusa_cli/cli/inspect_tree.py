"""`medusa inspect-tree`: draw a tree, and say what it and other sizes gain and cost on this machine."""

import json as json_module
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from medusa_cli.cli import options
from medusa_cli.cli.console import Console, write_result
from medusa_cli.config.loading import load_recipe
from medusa_cli.config.recipe import TargetSettings
from medusa_cli.errors import FormatError, TreeError
from medusa_cli.formats.places import find_heads
from medusa_cli.inspect import render
from medusa_cli.plots import tree as tree_plot

if TYPE_CHECKING:
    from medusa_cli.heads.config import HeadsConfig
    from medusa_cli.inspect.worth import Inspection, KnownCost
    from medusa_cli.model.costs.kept import Costs
    from medusa_cli.trees.contexts import ContextCost
    from medusa_cli.trees.files import Measured

Format = Literal["text", "json", "dot", "svg", "png", "medusa-choices"]
_BY_SUFFIX: dict[str, Format] = {".json": "json", ".dot": "dot", ".gv": "dot", ".svg": "svg", ".png": "png"}


def command(
    *,
    target: options.Target,
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
    curves: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw gain, cost and speed-up by size: a .png, .svg or .pdf.")
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Load the model and measure what its steps cost here. [default: remembered costs]"
        ),
    ] = False,
    contexts: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,…",
            help="With --measure: also after so many tokens of text, for 1 node and this tree: 128,512,2048,8192.",
        ),
    ] = None,
    threads: options.Threads = None,
    printed: options.Output,
) -> None:
    """Draw a tree with what each node gains, and what each size gains and costs: curves and a table."""
    asked = _Asked(tree, tree_size, compare)
    drawn = format or _BY_SUFFIX.get(output.suffix.lower() if output else "", "text")
    _check_usage(asked, drawn, format, output, json=printed.json)
    if compare and curves:
        raise typer.BadParameter("--curves draws one tree's heads; leave out --compare")
    lengths = _lengths(contexts, measure, comparing=compare is not None)
    from medusa_cli.plots.tree_sizes import check_curves, draw

    console = printed.console
    settings = load_recipe(None, values=target).target
    folder = find_heads(heads, settings.model)
    # the tree comes first: what is wrong with it is told before a model is loaded
    inspections = _inspections(asked, folder)
    if curves:
        check_curves(inspections[0], curves, contexts=bool(lengths))
    here, costs = _costs_here(settings, folder, measure, _Contexts(lengths, inspections[0].tree.num_nodes))
    inspections = [replace(inspection, here=here, contexts=costs) for inspection in inspections]
    if here and asked.is_open and folder and not lengths:
        inspections = [_as_it_pays(inspections[0], folder)]
    _show(_drawing(inspections, drawn), output, console)
    console.print_json(_document(inspections), printed.output_json)
    if curves:  # last: what is known is told even if the picture can't be written
        draw(inspections[0], curves)
        console.info(f"wrote {curves}")


@dataclass(frozen=True)
class _Asked:
    """Which trees: one by its SPEC or its size, two side by side, or that of the heads."""

    tree: str | None
    tree_size: int | None
    compare: tuple[str, str] | None

    @property
    def is_open(self) -> bool:
        """Whether no tree is named: then decoding, too, finds out which pays."""
        return self.tree is None and self.tree_size is None and self.compare is None


def _check_usage(asked: _Asked, drawn: Format, format: Format | None, output: Path | None, *, json: bool) -> None:
    """Refuse flags that contradict each other."""
    if asked.tree is not None and asked.tree_size is not None:
        raise typer.BadParameter("--tree and --tree-size both say which tree; give one")
    if asked.compare and (asked.tree is not None or asked.tree_size is not None):
        raise typer.BadParameter("--compare names its two trees; leave out --tree and --tree-size")
    if asked.compare and drawn != "text":
        raise typer.BadParameter("--compare is text; --json gives it as a document")
    if drawn == "png" and output is None:
        raise typer.BadParameter("--format png needs --output FILE")
    if json and format and output is None:
        raise typer.BadParameter("--json and --format both want stdout; give --output FILE for the drawing")


@dataclass(frozen=True)
class _Contexts:
    """After how many tokens steps are measured as well, and over how many nodes besides 1."""

    lengths: Sequence[int]
    num_nodes: int


def _lengths(text: str | None, measure: bool, *, comparing: bool) -> list[int]:
    """The lengths that `--contexts` names, ascending. Raises typer.BadParameter (exit 2)."""
    if text is None:
        return []
    if not measure or comparing:
        raise typer.BadParameter("--contexts is measured: " + ("leave out --compare" if comparing else "add --measure"))
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 10 and int(word) for word in words):
        raise typer.BadParameter(f"--contexts takes numbers of tokens by commas, 128,512,2048,8192, not {text!r}")
    return sorted({int(word) for word in words})


def _costs_here(
    settings: TargetSettings, folder: Path | None, measure: bool, contexts: _Contexts
) -> "tuple[KnownCost | None, list[ContextCost]]":
    """What a step of the heads' target costs on this machine: measured now, or as an earlier run remembered it.

    And, when it is measured, what it costs by context.
    """
    from medusa_cli.inspect.worth import KnownCost

    belongs = _belongs(folder)
    by_context: list[ContextCost] = []
    if measure:
        known, by_context = _measure(settings, folder, belongs, contexts)
    else:
        found = _remembered(settings, belongs.target_fingerprint if belongs else None)
        if found is None:
            return None, []
        known = found
    date = known.measured
    return KnownCost("here", known.seconds, known.runner, known.dtype, known.threads, date, known.disturbed), by_context


def _remembered(settings: TargetSettings, fingerprint: str | None) -> "Costs | None":
    """The newest costs of the very settings asked for: what is left to be found out is found out as loading does.

    Which runner `auto` is, only loading finds out; so it is what `auto` took when the model was last loaded here.
    """
    from medusa_cli.model.costs import kept as kept_costs
    from medusa_cli.model.device import choose_device, choose_dtype

    device = choose_device(settings.device)
    dtype = str(choose_dtype(settings.dtype, device)).removeprefix("torch.")
    asked = kept_costs.Asked(settings.model, fingerprint, dtype, str(device))
    runner = kept_costs.chosen_runner(asked) if settings.runner == "auto" else settings.runner
    return next(iter(kept_costs.found(asked, runner)), None) if runner else None


def _measure(
    settings: TargetSettings, folder: Path | None, belongs: "HeadsConfig | None", contexts: _Contexts
) -> "tuple[Costs, list[ContextCost]]":
    """The costs of the model's steps, measured now and remembered; those by context are told and not remembered.

    Raises HeadsMismatch for another model's heads, TargetError for a context beyond its positions, and DataError for
    one whose cache doesn't fit into memory.
    """
    from medusa_cli.assemble import adapter_of, load_target
    from medusa_cli.heads.config import check_belongs
    from medusa_cli.inspect.contexts_measured import costs_by_context
    from medusa_cli.model.costs.by_nodes import measure_and_keep

    target = load_target(settings, adapter_of(folder) if belongs else None)
    if belongs:
        check_belongs(belongs, target)
    by_context = costs_by_context(target, contexts.lengths, contexts.num_nodes) if contexts.lengths else []
    return measure_and_keep(target), by_context


def _belongs(folder: Path | None) -> "HeadsConfig | None":
    """What the heads in `folder` say they are; None where there are none, or only what was measured of some."""
    from medusa_cli.registry import read_config

    try:
        return read_config(folder) if folder else None
    except FormatError:
        return None


def _inspections(asked: _Asked, folder: Path | None) -> "list[Inspection]":
    """The trees asked for, with what was measured of the heads in `folder`."""
    from medusa_cli.trees.files import read_measured

    measured = read_measured(folder) if folder else None
    if asked.compare:
        return [_inspect(folder, measured, spec, None) for spec in asked.compare]
    return [_inspect(folder, measured, asked.tree, asked.tree_size)]


def _inspect(folder: Path | None, measured: "Measured | None", spec: str | None, tree_size: int | None) -> "Inspection":
    """The tree that the flags name, with what was measured."""
    from medusa_cli.inspect.worth import Inspection
    from medusa_cli.trees.build import best_tree
    from medusa_cli.trees.dynamic import DynamicShape
    from medusa_cli.trees.files import parse_tree, read_shape, read_tree

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


def _as_it_pays(stored: "Inspection", folder: Path) -> "Inspection":
    """The tree that decoding tends to when none is named: of the size that pays at this machine's costs."""
    from medusa_cli.assemble import MOST_GUESSES
    from medusa_cli.trees.build import best_tree

    if stored.measured is None or stored.choice is None:
        return stored
    size = min(stored.choice.size, MOST_GUESSES)
    name = (
        f"tree that pays best here, heads of {folder}; decoding makes one anew at every step, of up to {MOST_GUESSES} "
        f"nodes as they pay (--tree {folder}: the one stored)"
    )
    return replace(stored, name=name, tree=best_tree(stored.measured.conditional_KR, size))


def _document(inspections: "Sequence[Inspection]") -> dict[str, Any]:
    """The one JSON document."""
    from medusa_cli.inspect import report

    return report.document(*inspections) if len(inspections) == 1 else report.comparison_document(*inspections)


def _drawing(inspections: "Sequence[Inspection]", drawn: Format) -> str | bytes:
    """The tree in the format asked for, or two side by side."""
    from medusa_cli.inspect import report

    width = max(60, min(shutil.get_terminal_size((80, 24)).columns, 120))
    if len(inspections) > 1:
        one, other = inspections
        return report.comparison_page(one, other, width)
    (inspection,) = inspections
    if drawn == "text":
        return report.page(inspection, width)
    if drawn == "json":
        return json_module.dumps(render.to_json(inspection.nodes), indent=2) + "\n"
    if drawn == "png":
        return tree_plot.to_png(inspection.nodes)
    if drawn == "svg":
        return tree_plot.to_svg(inspection.nodes)
    return (render.to_dot if drawn == "dot" else render.to_choices)(inspection.nodes) + "\n"


def _show(drawing: str | bytes, output: Path | None, console: Console) -> None:
    """To the file named, else to stdout."""
    if output:
        write_result(output, drawing if isinstance(drawing, bytes) else drawing.encode())
        console.info(f"wrote {output}")
    else:
        assert isinstance(drawing, str)
        console.stream(drawing)
