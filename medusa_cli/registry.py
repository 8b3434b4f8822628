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
from medusa_cli.formats.native import NativeFormat, ready
from medusa_cli.heads.base import Heads
from medusa_cli.heads.config import HeadsConfig, HeadsTarget
from medusa_cli.model.target import Target
from medusa_cli.util import plugins

FORMATS: tuple[HeadFormat, ...] = (NativeFormat(),)


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
    """The format that the folder is of; ours where nobody knows it, whose reader says what is missing."""
    others = (plugins.load_plugin(plugins.FORMATS, name, HeadFormat)() for name in plugins.plugins(plugins.FORMATS))
    return next((each for each in (*FORMATS, *others) if each.detect(folder)), FORMATS[0])


def read_config(folder: Path) -> HeadsConfig:
    """What the heads in `folder` are and belong to. Raises FormatError."""
    config: HeadsConfig = format_of(folder).read_config(folder)
    return config


def read_heads(folder: Path, target: HeadsTarget) -> Heads:
    """The heads in `folder`, bound to `target` and ready to guess. Raises FormatError, and HeadsMismatch."""
    return ready(format_of(folder).read(folder), target)
