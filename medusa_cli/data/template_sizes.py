"""Sizes of what a template works with: characters of a value written out, and of what an operation is about to make.

Nothing here is estimated low: where the exact number is dear, it is one that can't be exceeded.
"""

import math
import re
from collections.abc import ItemsView, Iterable, KeysView, Mapping, Sequence, ValuesView
from typing import Any

from jinja2.utils import Namespace

MOST_BITS = 4096  # of a whole number
_SCALAR = 8  # characters of a number or a name of the language, and of what stands between two items
_NESTED = (list, tuple, set, frozenset, range, Mapping, KeysView, ValuesView, ItemsView, Namespace)
_STARRED = re.compile(r"%[-#0 +]*(\d*\.)?\*|\{[^{}]*:[^{}]*\{")  # a field whose width is an argument
_NUMBER = re.compile(r"\d+")

# by what of their other arguments the characters of the first are multiplied, at the worst
MULTIPLYING = {"expandtabs", "do_indent", "tojson", "do_tojson", "do_wordwrap", "translate", "do_urlize", "hex"}
JOINING = {"join", "do_join", "sync_do_join"}
REPLACING = {"replace", "do_replace"}
GROWING = (
    MULTIPLYING | JOINING | REPLACING
)  # what may make more than it is given; others at most as much as numbers say
# times that it may go over its text: once for each of these
PASSES = {"do_striptags": "<", "striptags": "<"}


def size(value: Any, most: int) -> int:
    """Characters of the value written out, all that it holds included; it stops counting beyond `most`.

    Something that is held twice counts twice, as it is written twice.
    """
    if isinstance(value, (str, bytes)):
        return len(value)
    if not isinstance(value, _NESTED):
        return _SCALAR
    total, waiting = 0, [value]
    while waiting and total <= most:
        one = waiting.pop()
        total += len(one) + _SCALAR if isinstance(one, (str, bytes)) else _SCALAR
        if isinstance(one, range):
            total += _SCALAR * len(one)
        elif isinstance(one, Namespace):
            waiting.append(object.__getattribute__(one, "_Namespace__attrs"))
        elif isinstance(one, Mapping):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, _NESTED):
            waiting += one
    return total


def made_by_operator(operator: str, left: Any, right: Any, most: int) -> int:
    """Characters or items that an operator is about to make; of whole numbers, inf where these get too long."""
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        return _number(operator, left, right, most)
    if operator == "%":
        return made_by_format(left, [right], most)
    if operator == "*":
        return _times(left, most) * _times(right, most)
    return size(left, most) + size(right, most)


def _times(value: Any, most: int) -> int:
    """How often it repeats something, or what is repeated."""
    return max(0, value) if isinstance(value, int) else size(value, most)


def _number(operator: str, left: float, right: float, most: int) -> int:
    if isinstance(left, float) or isinstance(right, float):
        return 0
    bits = left.bit_length() * (max(right, 0) if operator == "**" else 1) + right.bit_length()
    return most + 1 if bits > MOST_BITS else 0


def made_by_format(text: Any, args: Sequence[Any], most: int) -> int:
    """Characters of a text with fields at the most: each as wide as the largest value, or as the text itself says."""
    if not isinstance(text, (str, bytes)):
        return 0
    shown = text if isinstance(text, str) else text.decode("latin-1")
    fields = max(shown.count("%"), shown.count("{"))
    wide = max((size(arg, most) for arg in args), default=0)
    wide = max([wide, *(int(number[:9]) for number in _NUMBER.findall(shown))])
    if _STARRED.search(shown):
        wide = max([wide, *_widths(args)])
    return len(shown) + fields * wide


def _widths(args: Iterable[Any]) -> Iterable[int]:
    """Numbers among the arguments, or in texts and lists among them."""
    for arg in args:
        if isinstance(arg, int):
            yield abs(arg)
        elif isinstance(arg, str):
            yield from (int(number[:9]) for number in _NUMBER.findall(arg[:1000]))
        elif isinstance(arg, (list, tuple, Mapping)):
            yield from _widths(arg.values() if isinstance(arg, Mapping) else arg)


def made_by_call(name: str, values: Sequence[Any], most: int) -> int:
    """Characters that one of GROWING may make."""
    given = sum(size(value, most) for value in values)
    texts = [value for value in values if isinstance(value, (str, bytes))]
    numbers = [abs(value) for value in values if isinstance(value, int)]
    if name in REPLACING and texts:
        found = max((_count(texts[0], each) for each in texts[1:]), default=0)
        return given + found * max(map(len, texts[1:]), default=0)
    if name in JOINING:
        between = max(map(len, texts), default=0)
        items = max((len(value) for value in values if hasattr(value, "__len__")), default=0)
        return given + between * items
    others = [size(value, most) for value in values[1:]]
    return given + size(values[0], most) * max([0, *others, *numbers]) if values else 0


def _count(text: Any, each: Any) -> int:
    return text.count(each) if type(text) is type(each) else 0


def passes_of(name: str, values: Sequence[Any], most: int) -> int:
    """How often an operation may go over what it is given."""
    first: Any = values[0] if values else None
    if name in PASSES and isinstance(first, str):
        return 1 + first.count(PASSES[name])
    if name == "do_wordwrap" and isinstance(first, str):
        width = min([79, *(value for value in values[1:] if type(value) is int and value > 0)])
        return 1 + len(first) // width
    if name in ("do_sum", "sync_do_sum") and hasattr(first, "__len__"):
        return max(1, len(first)) if any(isinstance(one, (list, tuple)) for one in values[1:]) else 1
    if hasattr(first, "__len__") and name in ("do_sort", "do_dictsort", "sync_do_groupby", "do_groupby"):
        return max(1, math.ceil(math.log2(len(first) + 1)))
    return 1
