"""Registry: names become drafters, and folders become heads. The table of names is config/parts.py.

A package brings parts through entry points: `medusa.drafters` (a function, or a class of guesses), `medusa.heads` (a
subclass of heads.base.Heads) and `medusa.formats` (a class that fits contracts.HeadFormat). CONTRIBUTING.md shows each.
"""

from pathlib import Path

from medusa_cli.config.parts import FUNCTION, SOURCES
from medusa_cli.contracts import Drafter, HeadFormat
from medusa_cli.drafters.function import FunctionGuesses
from medusa_cli.drafters.source import Source, Wishes
from medusa_cli.errors import PartError
from medusa_cli.formats.foreign.adopting import adopted
from medusa_cli.formats.foreign.layouts import LAYOUTS
from medusa_cli.formats.foreign.reading import ForeignFormat, find_foreign, holds_weights, layout_names
from medusa_cli.formats.native import NativeFormat, ready
from medusa_cli.heads.base import Heads
from medusa_cli.heads.config import UNKNOWN, HeadsConfig, HeadsTarget
from medusa_cli.model.target import Target
from medusa_cli.util import plugins

FOREIGN: dict[str, HeadFormat] = {layout.name: ForeignFormat(layout.name) for layout in LAYOUTS}
FORMATS: tuple[HeadFormat, ...] = (NativeFormat(), *FOREIGN.values())


def guesser(name: str, target: Target, wishes: Wishes) -> Drafter | Source:
    """Who guesses by the name of a source.

    Another package's may be a class, made with the target, that is a source of guesses or a whole drafter; or any
    function from a row's token ids to those that may follow (drafters/function.py). Raises PartError.
    """
    if part := SOURCES.get(name):
        ours: Source = plugins.load_part(part.module).of(target, wishes)
        return ours
    if name.startswith(FUNCTION):
        function = wishes.function or plugins.load_function(name.removeprefix(FUNCTION))
        return FunctionGuesses(function, target.real_vocab, name, wishes.errors)
    found = plugins.load_plugin(plugins.DRAFTERS, name)
    for protocol, mark in ((Source, "add_guesses"), (Drafter, "propose")):
        if hasattr(found, mark):
            made: Drafter | Source = plugins.load_plugin(plugins.DRAFTERS, name, protocol)(target)
            return made
    if callable(found):
        return FunctionGuesses(found, target.real_vocab, plugins.whose(plugins.DRAFTERS, name), wishes.errors)
    raise PartError(
        f"{plugins.whose(plugins.DRAFTERS, name)} is neither a function nor a class with add_guesses or propose",
        "see CONTRIBUTING.md for what a drafter may be",
    )


def format_of(folder: Path) -> HeadFormat:
    """The format that the folder is of; ours where nobody knows it, whose reader says what is missing.

    Raises FormatError where files of heads are damaged, hold something else, or are of several tools' formats.
    """
    native = FORMATS[0]
    if native.detect(folder):
        return native
    tools = layout_names(folder)
    if len(tools) == 1:
        return FOREIGN[tools[0]]
    others = (plugins.load_plugin(plugins.FORMATS, name, HeadFormat)() for name in plugins.plugins(plugins.FORMATS))
    if found := None if tools else next((each for each in others if each.detect(folder)), None):
        return found
    if holds_weights(folder):
        find_foreign(folder)  # says what is wrong with them
    return native


def read_config(folder: Path) -> HeadsConfig:
    """What the heads in `folder` are and belong to. Raises FormatError."""
    config: HeadsConfig = format_of(folder).read_config(folder)
    return config


def read_heads(folder: Path, target: HeadsTarget) -> Heads:
    """The heads in `folder`, bound to `target` and ready to guess. Raises FormatError, and HeadsMismatch.

    Another tool's heads don't say which weights they belong to: any target of their sizes is taken for the one.
    """
    heads = format_of(folder).read(folder)
    return ready(adopted(heads, target) if heads.config.target_fingerprint == UNKNOWN else heads, target)
