"""The registry's table: every drafter and kind of heads by name, with a line on each and where it is. Imports none.

What stands here as text, registry.py and heads/kinds.py load when it is asked for; what other packages bring joins by
entry points (util/plugins.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from medusa_cli.errors import RecipeError
from medusa_cli.util import plugins

ANY = "any"
MIXED = "mixed"


@dataclass(frozen=True)
class HeadsPart:
    """A kind of heads; module: the class that computes them, as an entry point would name it."""

    help: str
    module: str


@dataclass(frozen=True)
class DrafterPart:
    """A drafter that can be named.

    heads   the kind of heads it takes; ANY: whichever there are; None: it takes none
    source  who guesses besides, as an entry point would name it; "": another package's; None: heads alone, or nobody
    """

    help: str
    heads: str | None = None
    source: str | None = None

    @property
    def guesses(self) -> bool:
        """Whether it can guess anything."""
        return self.source is not None or self.heads is not None

    @property
    def gathers(self) -> bool:
        """Whether guesses come from elsewhere than heads in a tree that could be named."""
        return self.source is not None


HEADS = {
    "medusa": HeadsPart("each head guesses by itself", "medusa_cli.heads.medusa:MedusaHeads"),
    "hydra": HeadsPart("each head sees the guesses before its own", "medusa_cli.heads.medusa:HydraHeads"),
}
_NGRAMS = "medusa_cli.drafters.ngram:Ngrams"
_ALONE = {
    "ngram": DrafterPart("what followed the same tokens earlier in the text", source=_NGRAMS),
    MIXED: DrafterPart("heads and n-grams together, as far as they pay", ANY, _NGRAMS),
    "none": DrafterPart("no guesses: plain decoding"),
}
DRAFTERS = {kind: DrafterPart(part.help, kind) for kind, part in HEADS.items()} | _ALONE


def drafters() -> Mapping[str, DrafterPart]:
    """Those of this program, then those that other packages bring: theirs, and their kinds of heads."""
    kinds = {kind: DrafterPart("heads of another package", kind) for kind in plugins.plugins(plugins.HEADS)}
    others = {name: DrafterPart("of another package", source="") for name in plugins.plugins(plugins.DRAFTERS)}
    return kinds | others | DRAFTERS


def drafter_names() -> list[str]:
    """Those of this program, then those that other packages bring."""
    return list(dict.fromkeys([*DRAFTERS, *drafters()]))


def guessing_names() -> list[str]:
    """The drafters that guess something."""
    return [name for name in drafter_names() if drafter_part(name).guesses]


def drafter_part(name: str | None) -> DrafterPart:
    """The drafter of that name; None: the one that guesses with all there is. Raises RecipeError for an unknown one."""
    if found := drafters().get(name or MIXED):
        return found
    raise RecipeError(f"there is no drafter {name!r}", f"use one of {', '.join(drafter_names())}")


def head_kinds() -> list[str]:
    """Those of this program, then those that other packages bring."""
    return list(dict.fromkeys([*HEADS, *plugins.plugins(plugins.HEADS)]))
