"""The registry's table: every drafter and kind of heads by name, with a line on each and where it is. Imports none.

What stands here as text, registry.py and heads/kinds.py load when it is asked for; what other packages bring joins by
entry points (util/plugins.py). Two kinds of names are made up by who asks: `python:package.module:function`, and
`mixed:a,b` for several parts together.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from medusa_cli.errors import RecipeError
from medusa_cli.util import plugins

ANY = "any"
MIXED = "mixed"
FUNCTION = "python:"


@dataclass(frozen=True)
class HeadsPart:
    """A kind of heads.

    module       the class that computes them, as an entry point would name it
    defaults     sections of a recipe where this kind begins otherwise than others
    looks_back   it sees inner states of the target at every place before
    """

    help: str
    module: str
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    looks_back: bool = False


@dataclass(frozen=True)
class SourcePart:
    """Who guesses without heads.

    module        the class that does, as an entry point would name it; its `of` makes one
    draft_model   whether it runs another model, which must be named
    """

    help: str
    module: str
    draft_model: bool = False


@dataclass(frozen=True)
class DrafterPart:
    """A drafter that can be named.

    heads     the kind of heads it takes; ANY: whichever there are; None: it takes none
    sources   who guesses besides: names of SOURCES, of another package's parts, or functions as `python:` names them
    """

    help: str
    heads: str | None = None
    sources: tuple[str, ...] = ()

    @property
    def guesses(self) -> bool:
        """Whether it can guess anything."""
        return self.gathers or self.heads is not None

    @property
    def gathers(self) -> bool:
        """Whether guesses come from elsewhere than heads in a tree that could be named."""
        return bool(self.sources)

    @property
    def draft_model(self) -> bool:
        """Whether another model must be named."""
        return any(SOURCES[name].draft_model for name in self.sources if name in SOURCES)


HEADS = {
    "medusa": HeadsPart("each head guesses by itself", "medusa_cli.heads.medusa:MedusaHeads"),
    "hydra": HeadsPart("each head sees the guesses before its own", "medusa_cli.heads.medusa:HydraHeads"),
    "block": HeadsPart(
        "one pass for all, in view of the whole text",
        "medusa_cli.heads.block:BlockHeads",
        {
            "heads": {"num_heads": 6, "num_layers": 2},
            "train": {
                "epochs": 10.0,
                "batch_size": 512,
                "learning_rate": 6e-4,
                "warmup_ratio": 0.04,
                "head_decay": 0.7788,
                "losses": {"ce": 0.1, "l1": 0.9},
                "place_share": 0.25,
                "clip": 1.0,
            },
        },
        looks_back=True,
    ),
}
SOURCES = {
    "suffix": SourcePart("what followed the longest end of the text before", "medusa_cli.drafters.suffix:Suffixes"),
    "model": SourcePart("a smaller model (--draft-model)", "medusa_cli.drafters.draft_model:ModelGuesses", True),
    "llama-cpp": SourcePart("a .gguf model, run by llama.cpp", "medusa_cli.drafters.llama_cpp:LlamaCppGuesses", True),
}
DRAFTERS = {
    **{kind: DrafterPart(part.help, kind) for kind, part in HEADS.items()},
    **{name: DrafterPart(part.help, sources=(name,)) for name, part in SOURCES.items()},
    "ngram": DrafterPart("another name for suffix", sources=("suffix",)),
    MIXED: DrafterPart("heads and suffixes together, as far as they pay", ANY, ("suffix",)),
    "none": DrafterPart("no guesses: plain decoding"),
}


def drafters() -> Mapping[str, DrafterPart]:
    """Those of this program, then those that other packages bring: theirs, and their kinds of heads."""
    kinds = {kind: DrafterPart("heads of another package", kind) for kind in plugins.plugins(plugins.HEADS)}
    others = {name: DrafterPart("of another package", sources=(name,)) for name in plugins.plugins(plugins.DRAFTERS)}
    return kinds | others | DRAFTERS


def drafter_names() -> list[str]:
    """Those of this program, then those that other packages bring."""
    return list(dict.fromkeys([*DRAFTERS, *drafters()]))


def guessing_names() -> list[str]:
    """The drafters that guess something."""
    return [name for name in drafter_names() if drafter_part(name).guesses]


def drafter_part(name: str | None) -> DrafterPart:
    """The drafter of that name; None: the one that guesses with all there is. Raises RecipeError for an unknown one."""
    name = MIXED if name is None else name
    if found := drafters().get(name):
        return found
    if name.startswith(FUNCTION):
        return _function(name)
    if name.startswith(f"{MIXED}:"):
        return _mixture(name, [drafter_part(each.strip()) for each in name.removeprefix(f"{MIXED}:").split(",")])
    near = difflib.get_close_matches(name, drafter_names(), n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    known = ", ".join([*drafter_names(), f"{FUNCTION}package.module:function", f"{MIXED}:a,b"])
    raise RecipeError(f"there is no drafter {name!r}", f"{meant}use one of {known}")


def _function(name: str) -> DrafterPart:
    """A function by its module and name."""
    module, _, function = name.removeprefix(FUNCTION).partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *function.split("."))):
        raise RecipeError(f"{name!r} names no function", f"write {FUNCTION}package.module:function")
    return DrafterPart("a function", sources=(name,))


def _mixture(name: str, parts: Sequence[DrafterPart]) -> DrafterPart:
    """Several drafters under one budget."""
    if idle := [part for part in parts if not part.guesses]:
        raise RecipeError(f"{name}: {idle[0].help}", "leave that one out")
    kinds = list(dict.fromkeys(part.heads for part in parts if part.heads))
    if len(kinds) > 1:
        raise RecipeError(f"{name} takes heads of {len(kinds)} kinds", f"leave one of {' and '.join(kinds)} out")
    sources = tuple(dict.fromkeys(source for part in parts for source in part.sources))
    return DrafterPart("several drafters under one budget", kinds[0] if kinds else None, sources)


def defaults_of(kind: str) -> Mapping[str, Mapping[str, Any]]:
    """Sections of a recipe where this kind of heads begins otherwise than others."""
    return HEADS[kind].defaults if kind in HEADS else {}


def looks_back(kind: str) -> bool:
    """Whether heads of this kind see inner states of the target."""
    return kind in HEADS and HEADS[kind].looks_back


def head_kinds() -> list[str]:
    """Those of this program, then those that other packages bring."""
    return list(dict.fromkeys([*HEADS, *plugins.plugins(plugins.HEADS)]))
