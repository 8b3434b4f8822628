"""Names become objects, here and nowhere else: heads, drafters, trees and rules from what the command line says."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.acceptance.lossless import Lossless
from medusa_cli.contracts import AcceptanceRule, Drafter
from medusa_cli.drafters.medusa import MedusaDrafter
from medusa_cli.drafters.none import NoDrafter
from medusa_cli.errors import FormatError, RecipeError
from medusa_cli.formats.native import DESCRIPTION, read_heads
from medusa_cli.target.load import load_target
from medusa_cli.target.model import Target
from medusa_cli.trees.build import best_tree
from medusa_cli.trees.files import parse_tree, read_measured, read_tree
from medusa_cli.trees.tree import TokenTree

__all__ = ["DrafterChoice", "find_heads", "load_drafter", "load_rule", "load_target"]

SHIPPED = Path(__file__).parent / "heads" / "shipped"


@dataclass(frozen=True)
class DrafterChoice:
    """What was asked for. name None: medusa where heads are known, else none; tree and tree_size None: as stored."""

    name: Literal["medusa", "none"] | None = None
    heads: str | None = None
    tree: str | None = None
    tree_size: int | None = None


def find_heads(heads: str | None, model: str) -> Path | None:
    """The folder of the heads named, or of those that come with the package for this model; None when it has none.

    Raises FormatError when heads are named and not there.
    """
    if heads is None:
        folder = SHIPPED / model / "medusa"
        return folder if (folder / DESCRIPTION).is_file() else None
    folder = Path(heads).expanduser()
    if folder.is_dir() or not _is_hub_id(heads):
        return folder
    return _from_hub(heads)


def load_drafter(choice: DrafterChoice, target: Target) -> Drafter:
    """The drafter asked for, its heads bound to the target and its tree checked against them."""
    folder = None if choice.name == "none" else find_heads(choice.heads, target.name)
    if folder is None:
        if choice.name == "medusa" or choice.tree or choice.tree_size is not None:
            raise FormatError(
                f"no heads are known for {target.name}", "name some with --heads, or train them: medusa train-heads"
            )
        return NoDrafter()
    heads = read_heads(folder, target)
    if target.identity.runner == "packed":
        heads.pack()
    tree = _choose_tree(choice, folder)
    return MedusaDrafter(heads, tree) if tree.num_nodes > 1 else NoDrafter()


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


def _choose_tree(choice: DrafterChoice, folder: Path) -> TokenTree:
    """The tree named, the best one of a size, or the one stored with the heads."""
    if choice.tree is not None and choice.tree_size is not None:
        raise RecipeError("--tree and --tree-size both say which tree", "give one of them")
    if choice.tree is not None:
        return parse_tree(choice.tree)
    if choice.tree_size is not None:
        return best_tree(read_measured(folder).conditional_KR, choice.tree_size)
    return read_tree(folder)


def _is_hub_id(text: str) -> bool:
    return text.count("/") == 1 and not text.startswith((".", "/", "~"))


def _from_hub(name: str) -> Path:
    """Download a heads folder, or use what was downloaded before."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise FormatError(
            f"no heads at {name}: no such folder, and the hub did not give it ({type(error).__name__})",
            "check the name; HF_HUB_OFFLINE=1 uses only what was downloaded before",
        ) from error
