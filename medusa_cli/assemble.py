"""Names become objects, here and nowhere else: heads, drafters, trees and rules from what the command line says."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.acceptance.lossless import Lossless
from medusa_cli.contracts import AcceptanceRule, Drafter
from medusa_cli.drafters.dynamic import DynamicMedusaDrafter
from medusa_cli.drafters.medusa import MedusaDrafter
from medusa_cli.drafters.none import NoDrafter
from medusa_cli.errors import FormatError, RecipeError
from medusa_cli.formats.native import read_heads
from medusa_cli.formats.places import find_heads
from medusa_cli.heads.medusa import MedusaHeads
from medusa_cli.target.load import load_target
from medusa_cli.target.model import Target
from medusa_cli.trees.build import best_tree
from medusa_cli.trees.dynamic import DynamicShape
from medusa_cli.trees.files import parse_tree, read_measured, read_tree
from medusa_cli.trees.tree import TokenTree

__all__ = ["DrafterChoice", "check_choice", "find_heads", "lay_out_heads", "load_drafter", "load_rule", "load_target"]


@dataclass(frozen=True)
class DrafterChoice:
    """What was asked for. name None: medusa where heads are known, else none; tree and tree_size None: as stored."""

    name: Literal["medusa", "none"] | None = None
    heads: str | None = None
    tree: str | None = None
    tree_size: int | None = None


def check_choice(choice: DrafterChoice, model: str) -> None:
    """Raise what is wrong with the flags, the heads' place or the tree before a model of gigabytes is loaded."""
    folder = _folder(choice, model)
    if folder is not None:
        _choose_tree(choice, folder)


def load_drafter(choice: DrafterChoice, target: Target) -> Drafter:
    """The drafter asked for, its heads bound to the target and its tree checked against them."""
    folder = _folder(choice, target.name)
    if folder is None:
        return NoDrafter()
    heads = read_heads(folder, target)
    lay_out_heads(heads, target)
    tree = _choose_tree(choice, folder)
    if isinstance(tree, DynamicShape):
        return DynamicMedusaDrafter(heads, tree)
    return MedusaDrafter(heads, tree) if tree.num_nodes > 1 else NoDrafter()


def lay_out_heads(heads: MedusaHeads, target: Target) -> None:
    """Give the heads' shared output, in place, the layout that the target's runner gave its layers."""
    if target.identity.runner != "eager":
        heads.pack(blocks=target.identity.runner == "blocks")


def load_rule(name: str | None, temperature: float, top_p: float, top_k: int) -> AcceptanceRule:
    """greedy at temperature 0, else lossless; a name that contradicts the temperature is a RecipeError."""
    name = name or ("lossless" if temperature > 0 else "greedy")
    if name == "greedy":
        if temperature > 0:
            raise RecipeError(
                "greedy acceptance has no temperature", "use --acceptance lossless to sample, or --temperature 0"
            )
        return Greedy()
    if temperature == 0:
        raise RecipeError("lossless acceptance samples, at a temperature above 0", "give --temperature, such as 0.7")
    return Lossless(temperature, top_p, top_k)


def _folder(choice: DrafterChoice, model: str) -> Path | None:
    """Where the heads are; None when there are none, or none are wanted."""
    tree_named = choice.tree is not None or choice.tree_size is not None
    if choice.name == "none":
        if choice.heads is not None or tree_named:
            raise RecipeError("--drafter none guesses nothing", "leave out --heads, --tree and --tree-size")
        return None
    folder = find_heads(choice.heads, model)
    if folder is None and (choice.name == "medusa" or tree_named):
        raise FormatError(f"no heads are known for {model}", "name some with --heads, or make them: medusa train-heads")
    return folder


def _choose_tree(choice: DrafterChoice, folder: Path) -> TokenTree | DynamicShape:
    """The tree named, fixed or dynamic, the best one of a size, or the one stored with the heads."""
    if choice.tree is not None and choice.tree_size is not None:
        raise RecipeError("--tree and --tree-size both say which tree", "give one of them")
    if choice.tree is not None:
        return DynamicShape.parse(choice.tree) or parse_tree(choice.tree)
    if choice.tree_size is not None:
        return best_tree(read_measured(folder).conditional_KR, choice.tree_size)
    return read_tree(folder)
