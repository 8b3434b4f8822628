"""Names become objects, here and nowhere else: heads, drafters and trees from what the command line says."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from medusa_cli.config.parts import ANY, MIXED, DrafterPart, drafter_part
from medusa_cli.config.recipe import TargetSettings
from medusa_cli.contracts import Drafter
from medusa_cli.drafters.adaptive import WatchedDrafter
from medusa_cli.drafters.block import BlockDrafter
from medusa_cli.drafters.hydra import HydraDrafter
from medusa_cli.drafters.medusa import MedusaDrafter
from medusa_cli.drafters.mixed import Budget, GatheredDrafter, HeadsDrafter
from medusa_cli.drafters.none import NoDrafter
from medusa_cli.drafters.source import Source, Wishes, is_source
from medusa_cli.drafters.step_costs import Pace
from medusa_cli.errors import FormatError, RecipeError
from medusa_cli.formats.places import find_heads
from medusa_cli.heads.base import Heads
from medusa_cli.heads.block import BlockHeads
from medusa_cli.model.adapter import FOLDER as ADAPTER
from medusa_cli.model.adapter import StoredAdapter, stored_adapter
from medusa_cli.model.costs.by_nodes import step_costs
from medusa_cli.model.costs.kept import correct, key_of
from medusa_cli.model.loading.load import load_target
from medusa_cli.model.runners.kinds import RUNNERS
from medusa_cli.model.target import Target
from medusa_cli.registry import FOREIGN, format_of, guesser, read_config, read_heads
from medusa_cli.trees.build import best_tree
from medusa_cli.trees.dynamic import DynamicShape
from medusa_cli.trees.files import parse_tree, read_measured, read_shape
from medusa_cli.trees.tree import TokenTree

__all__ = [
    "DrafterChoice",
    "Speculate",
    "adapter_for",
    "adapter_of",
    "check_choice",
    "correct_costs",
    "find_heads",
    "in_shape",
    "lay_out_heads",
    "load_drafter",
    "load_target",
    "load_target_for",
]


logger = logging.getLogger(__name__)
Speculate = Literal["auto", "on", "off"]
MOST_GUESSES = 16  # nodes that gathered drafts may have where no size is named; how many pay is found out


@dataclass(frozen=True)
class DrafterChoice:
    """What was asked for.

    name        None: mixed where heads are known, or these heads alone with a tree or speculate on; else none
    tree        a fixed or dynamic shape for the heads; with tree_size None as well: as they pay, or as stored
    speculate   auto: guesses are left out while they don't pay; on: they never are; off: none are made
    wishes      what those who guess without heads are told
    """

    name: str | None = None
    heads: str | None = None
    tree: str | None = None
    tree_size: int | None = None
    speculate: Speculate = "auto"
    wishes: Wishes = Wishes()

    @property
    def part(self) -> DrafterPart:
        """What the name stands for. Raises RecipeError for one that nobody knows."""
        return drafter_part(self.name)

    @property
    def finds_own_tree(self) -> bool:
        """Whether guesses come from elsewhere than heads in a tree that could be named."""
        return self.name is not None and self.part.gathers


def check_choice(choice: DrafterChoice, model: str) -> None:
    """Raise what is wrong with the flags, the heads' place or the tree before a model of gigabytes is loaded."""
    folder = _folder(choice, model)
    _check_wishes(choice, folder)
    if folder is not None and not choice.finds_own_tree:
        _choose_tree(choice, folder)


def _check_wishes(choice: DrafterChoice, folder: Path | None) -> None:
    """Raise RecipeError for a model that is missing, and for a model or a memory that nobody uses."""
    named = choice.wishes.draft_model is not None
    copies = "suffix" in choice.part.sources and choice.speculate != "off"
    if choice.wishes.memory is not None and not (copies and _gathers(choice, folder)):
        raise RecipeError(
            "--suffix-memory is given, and nobody copies from it", "add --drafter suffix, or mixed:medusa,suffix"
        )
    if choice.part.draft_model and not named:
        raise RecipeError(f"--drafter {choice.name} needs a model that guesses", "name it with --draft-model")
    if named and not choice.part.draft_model:
        raise RecipeError(
            f"--draft-model is given, and {choice.name or 'the default drafter'} runs no model",
            "add --drafter model, or --drafter llama-cpp for a .gguf file",
        )


def _gathers(choice: DrafterChoice, folder: Path | None) -> bool:
    """Whether guesses are gathered under one budget, those of heads too: no tree was named, or none can be."""
    by_pace = choice.speculate == "auto" and choice.tree is None and choice.tree_size is None
    return choice.finds_own_tree or (folder is not None and by_pace)


def load_target_for(choice: DrafterChoice, settings: TargetSettings) -> Target:
    """The target that the heads of this choice belong to: with their adapter merged, if they have one.

    Raises as `load_target` and `adapter_for`.
    """
    return load_target(settings, adapter_for(choice, settings.model))


def adapter_for(choice: DrafterChoice, model: str) -> StoredAdapter | None:
    """The adapter that the heads of this choice need; None when they need none, or none are wanted.

    Raises FormatError for an adapter that is missing, damaged or not the heads' own.
    """
    return adapter_of(_folder(choice, model))


def adapter_of(folder: Path | None) -> StoredAdapter | None:
    """The adapter that the heads in `folder` need; None when they need none. Raises FormatError as `adapter_for`."""
    config = read_config(folder) if folder is not None else None
    if config is None or config.adapter is None:
        return None
    assert folder is not None
    return stored_adapter(
        folder / ADAPTER,
        fingerprint=config.adapter,
        target_fingerprint=config.target_fingerprint,
        owner=config.target_name,
    )


def load_drafter(choice: DrafterChoice, target: Target) -> Drafter:
    """The drafter asked for, its heads bound to the target and its tree checked against them."""
    folder = _folder(choice, target.name)
    _check_wishes(choice, folder)
    if choice.speculate == "off" or (folder is None and not choice.finds_own_tree):
        return NoDrafter()
    heads = read_heads(folder, target) if folder is not None else None
    if heads is not None:
        _check_kind(choice, heads)
        lay_out_heads(heads, target)
    if _gathers(choice, folder):
        return _gathering(choice, heads, target)
    assert heads is not None
    assert folder is not None
    return _while_it_pays(choice, in_shape(heads, _choose_tree(choice, folder)))


def _while_it_pays(choice: DrafterChoice, drafter: Drafter) -> Drafter:
    return drafter if choice.speculate == "on" or drafter.size == 0 else WatchedDrafter(drafter)


def _check_kind(choice: DrafterChoice, heads: Heads) -> None:
    """Raise FormatError when heads of one kind were asked for and those of another are there."""
    if choice.name is not None and choice.part.heads not in (ANY, heads.config.type):
        raise FormatError(
            f"--drafter {choice.name} was asked for, and these are {heads.config.type} heads",
            f"use --drafter {heads.config.type}, or name other heads with --heads",
        )


def heads_folder(choice: DrafterChoice, model: str) -> Path | None:
    """Where the heads of this choice are; None where it takes none, or none are known. Raises FormatError."""
    return None if choice.part.heads is None else _folder(choice, model)


def in_shape(heads: Heads, shape: TokenTree | DynamicShape) -> Drafter:
    """Heads that draft in this shape."""
    return NoDrafter() if isinstance(shape, TokenTree) and shape.num_nodes == 1 else _drafting(heads, shape)


def _drafting(heads: Heads, shape: TokenTree | DynamicShape) -> HeadsDrafter:
    """Heads that draft in a shape with nodes, or bring its guesses to others."""
    if heads.config.looks_back:
        return BlockDrafter(cast(BlockHeads, heads), shape)
    return HydraDrafter(heads.by_level(), shape) if heads.config.sees_path else MedusaDrafter(heads, shape)


def _gathering(choice: DrafterChoice, heads: Heads | None, target: Target) -> Drafter:
    """Guesses of heads, of a source, or of both, as far as they pay at this machine's pace; or a drafter of its own."""
    size = MOST_GUESSES if choice.tree_size is None else choice.tree_size
    if not size:
        return NoDrafter()
    made = [guesser(name, target, choice.wishes) for name in choice.part.sources]
    whole = [each for each in made if not is_source(each)]
    if whole and (len(made) > 1 or heads is not None):
        raise RecipeError(f"--drafter {choice.name}: one of them drafts by itself", "name that one alone")
    if whole:
        return _while_it_pays(choice, cast(Drafter, whole[0]))
    sources = [cast(Source, each) for each in made]
    if heads is not None:
        sources.insert(0, _drafting(heads, DynamicShape(size)))
    costs = step_costs(target) if choice.speculate == "auto" else None
    pace = Pace(costs.seconds, costs.laps) if costs else None
    return GatheredDrafter(sources, Budget(size, pace), choice.name or MIXED)


def correct_costs(drafter: Drafter, target: Target) -> None:
    """Put right what is remembered of this target's steps by what they took while this drafter's texts were written.

    For who was left alone meanwhile (util/busy.py): what neighbours took says nothing of the next run.
    """
    if isinstance(drafter, GatheredDrafter) and drafter.budget.pace is not None:
        correct(key_of(target), drafter.lap_times.medians())


def lay_out_heads(heads: Heads, target: Target) -> None:
    """Give the heads' shared output, in place, the layout that the target's runner gave its layers."""
    runner = RUNNERS[target.identity.runner]
    if runner.packs:
        heads.pack(blocks=runner.few_bits)


def _folder(choice: DrafterChoice, model: str) -> Path | None:
    """Where the heads are; None when there are none, or none are wanted."""
    tree_named = choice.tree is not None or choice.tree_size is not None
    part = choice.part
    if not part.guesses:
        if choice.heads is not None or tree_named:
            raise RecipeError(f"--drafter {choice.name} guesses nothing", "leave out --heads, --tree and --tree-size")
        return None
    if choice.finds_own_tree and choice.tree is not None:
        raise RecipeError(
            f"--drafter {choice.name} finds a tree of its own at every step", "leave out --tree; --tree-size limits it"
        )
    if part.heads is None:
        if choice.heads is not None:
            raise RecipeError(f"--drafter {choice.name} needs no heads", f"leave out --heads, or use --drafter {MIXED}")
        return None
    folder = find_heads(choice.heads, model, None if part.heads == ANY else part.heads)
    if folder is None and (choice.name is not None or tree_named):
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
    if (name := format_of(folder).name) in FOREIGN:
        logger.info(
            "%s: heads of the format %s bring no tree: a chain is used; medusa import fits a tree", folder, name
        )
        return TokenTree.chain(read_config(folder).num_heads)
    return read_shape(folder)
