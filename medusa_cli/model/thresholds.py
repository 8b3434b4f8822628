"""Numbers in a config at which a model may change its ways: windows, chunks, lengths that positions were made for.

Found by what a config calls them, since each architecture has words of its own.
"""

from collections.abc import Iterator, Mapping
from typing import Any

_NAMES = ("window", "chunk", "local", "original", "max_position", "n_positions", "n_ctx", "seq_len", "span", "floor")
_POSITIONS = ("rope", "rotary")  # all that is said below such a name
_BASES = ("theta", "base")  # of frequencies: no number of tokens


def thresholds(config: Any) -> dict[str, int]:
    """Name -> tokens, each number once and in rising order; a number of one token or none switches nothing."""
    named: dict[int, str] = {}
    for name, number in _numbers(config.to_dict(), "", inside=False):
        if number > 1:
            named.setdefault(number, name)
    return {named[number]: number for number in sorted(named)}


def _numbers(node: Any, name: str, *, inside: bool) -> Iterator[tuple[str, int]]:
    """Whole numbers that may be thresholds, with the last name on the way to them."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            below = inside or any(word in str(key) for word in _POSITIONS)
            yield from _numbers(value, str(key), inside=below)
    elif isinstance(node, int) and not isinstance(node, bool):
        wanted = inside or any(word in name for word in _NAMES)
        if wanted and not any(word in name for word in _BASES):
            yield name, node
