"""Entry points: parts that other packages bring, by group and name. Looked for when they are first asked for."""

import functools
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from medusa_cli.errors import MedusaError

DRAFTERS, HEADS, FORMATS = "medusa.drafters", "medusa.heads", "medusa.formats"


@functools.cache
def plugins(group: str) -> dict[str, EntryPoint]:
    """Name -> entry point, none of them imported."""
    return {point.name: point for point in entry_points(group=group)}


def load_plugin(group: str, name: str, wanted: type) -> Any:
    """The part of that name, imported. Raises MedusaError where its package fails, or it isn't what is wanted.

    wanted   a type that the part must be an instance or a subclass of
    """
    point = plugins(group)[name]
    whose = f"{point.value}, which {point.dist.name if point.dist else 'a package'} brings as {group}: {name},"
    try:
        part = point.load()
    # another's package may fail in any way while it is imported
    except Exception as error:
        told = " ".join(str(error).split())[:200] or type(error).__name__
        raise MedusaError(f"{whose} can't be imported: {told}", "mend or remove that package") from error
    if not (isinstance(part, wanted) or (isinstance(part, type) and issubclass(part, wanted))):
        raise MedusaError(f"{whose} is no {wanted.__name__}", f"see {wanted.__module__} for what it must be")
    return part
