"""Entry points: parts that other packages bring, by group and name. Looked for when they are first asked for."""

import functools
import sys
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from medusa_cli.errors import PartError

DRAFTERS, HEADS, FORMATS = "medusa.drafters", "medusa.heads", "medusa.formats"


@functools.cache
def plugins(group: str) -> dict[str, EntryPoint]:
    """Name -> entry point, none of them imported."""
    return {point.name: point for point in entry_points(group=group)}


def load_part(value: str) -> Any:
    """A part of this program, from `module:name`."""
    return EntryPoint("", value, "").load()


def load_function(value: str) -> Any:
    """A user's callable, from `module:name`; the working directory is looked in last. Raises PartError."""
    module = value.partition(":")[0].partition(".")[0]
    here = str(Path.cwd())
    if here not in sys.path and find_spec(module) is None:
        sys.path.append(here)
    try:
        found = load_part(value)
    except Exception as error:
        told = " ".join(str(error).split())[:200] or type(error).__name__
        raise PartError(f"{value} can't be imported: {told}", "is it installed, or in this folder?") from error
    if not callable(found):
        raise PartError(f"{value} is no function", "name one that takes token ids and returns those that may follow")
    return found


def load_plugin(group: str, name: str, wanted: type | None = None) -> Any:
    """The part of that name, imported. Raises PartError where its package fails, or it isn't what is wanted.

    wanted   a protocol whose methods the part must have, or else a type that it must be an instance or a subclass of
    """
    point = plugins(group)[name]
    try:
        part = point.load()
    # another's package may fail in any way while it is imported
    except Exception as error:
        told = " ".join(str(error).split())[:200] or type(error).__name__
        raise PartError(f"{whose(group, name)} can't be imported: {told}", "mend or remove that package") from error
    if wanted is None:
        return part
    hint = f"see {wanted.__name__} in {wanted.__module__} for what it must be"
    if getattr(wanted, "_is_protocol", False):
        if lacks := [method for method in _methods(wanted) if not callable(getattr(part, method, None))]:
            raise PartError(f"{whose(group, name)} is no {wanted.__name__}: it lacks {', '.join(lacks)}", hint)
    elif not (isinstance(part, wanted) or (isinstance(part, type) and issubclass(part, wanted))):
        raise PartError(f"{whose(group, name)} is no {wanted.__name__}", hint)
    return part


def whose(group: str, name: str) -> str:
    """A part as the beginning of a sentence: what it is and which package brings it."""
    point = plugins(group)[name]
    return f"{point.value}, which {point.dist.name if point.dist else 'a package'} brings as {group}: {name},"


def _methods(protocol: type) -> list[str]:
    """Names of the methods that a protocol asks for, those of protocols under it included."""
    members = [member for base in protocol.__mro__[:-1] for member in vars(base).items()]
    return list(dict.fromkeys(name for name, each in members if callable(each) and not name.startswith("_")))
