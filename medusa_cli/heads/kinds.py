"""Kinds of heads by name: those of this program, and those that other packages bring."""

from medusa_cli.config.parts import HEADS, head_kinds
from medusa_cli.errors import FormatError
from medusa_cli.heads.base import Heads
from medusa_cli.util import plugins


def heads_class(kind: str) -> type[Heads]:
    """The module for heads of this kind. Raises FormatError for a kind that nobody brings."""
    if kind not in HEADS and kind not in plugins.plugins(plugins.HEADS):
        raise FormatError(
            f"nothing here knows heads of kind {kind!r}; there are {', '.join(head_kinds())}",
            "install the package that brings them, or use other heads",
        )
    ours = HEADS.get(kind)
    found: type[Heads] = plugins.load_part(ours.module) if ours else plugins.load_plugin(plugins.HEADS, kind, Heads)
    return found
