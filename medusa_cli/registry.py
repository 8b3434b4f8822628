"""Registry: names become drafters, and folders become heads. The one table of each; other packages add to both.

The names with a line of help each, which a command line can read without torch, are in config/parts.py.

A package brings parts through entry points: `medusa.drafters` (a DrafterKind), `medusa.heads` (a subclass of
heads.base.Heads) and `medusa.formats` (a class that fits contracts.HeadFormat). CONTRIBUTING.md shows each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from medusa_cli.config.parts import drafter_names
from medusa_cli.contracts import Drafter, HeadFormat
from medusa_cli.drafters.mixed import Source
from medusa_cli.drafters.ngram import Ngrams
from medusa_cli.errors import RecipeError
from medusa_cli.formats.native import NativeFormat, ready
from medusa_cli.heads.base import Heads
from medusa_cli.heads.config import HeadsTarget, MedusaConfig
from medusa_cli.model.target import Target
from medusa_cli.util import plugins


@dataclass(frozen=True)
class DrafterKind:
    """A drafter that can be named.

    make    from a target, what guesses: a whole drafter, or a source of guesses that are taken as far as they pay, and
            that heads may be added to; None: heads alone guess, or nobody
    heads   the kind of heads it takes; any: whichever there are; None: it takes none
    """

    make: Callable[[Target], Drafter | Source] | None = None
    heads: str | None = None

    @property
    def guesses(self) -> bool:
        """Whether it can guess anything."""
        return self.make is not None or self.heads is not None


ANY = "any"
DRAFTERS = {
    "medusa": DrafterKind(heads="medusa"),
    "hydra": DrafterKind(heads="hydra"),
    "ngram": DrafterKind(make=lambda target: Ngrams()),
    "mixed": DrafterKind(make=lambda target: Ngrams(), heads=ANY),
    "none": DrafterKind(),
}
FORMATS: tuple[HeadFormat, ...] = (NativeFormat(),)


def drafter_kind(name: str) -> DrafterKind:
    """The drafter of that name. Raises RecipeError for a name that nobody brings."""
    if name in DRAFTERS:
        return DRAFTERS[name]
    if name not in plugins.plugins(plugins.DRAFTERS):
        raise RecipeError(f"there is no drafter {name!r}", f"use one of {', '.join(drafter_names())}")
    kind: DrafterKind = plugins.load_plugin(plugins.DRAFTERS, name, DrafterKind)
    return kind


def format_of(folder: Path) -> HeadFormat:
    """The format that the folder is of; ours where nobody knows it, whose reader says what is missing."""
    others = (plugins.load_plugin(plugins.FORMATS, name, object)() for name in plugins.plugins(plugins.FORMATS))
    return next((each for each in (*FORMATS, *others) if each.detect(folder)), FORMATS[0])


def read_config(folder: Path) -> MedusaConfig:
    """What the heads in `folder` are and belong to. Raises FormatError."""
    config: MedusaConfig = format_of(folder).read_config(folder)
    return config


def read_heads(folder: Path, target: HeadsTarget) -> Heads:
    """The heads in `folder`, bound to `target` and ready to guess. Raises FormatError, and HeadsMismatch."""
    return ready(format_of(folder).read(folder), target)
