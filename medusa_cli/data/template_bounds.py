"""Bounds for chat templates: how much one may make, loop and call. A template is a program that came with a model.

A template is first rendered here, under bounds; what passes is rendered by the library, whose text counts. Loops,
calls, operators, filters and joins are looked at before they run, so neither time nor memory is spent beyond them.
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from jinja2 import nodes
from jinja2.environment import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

OWN_WORDS, REPEATED = 1_000_000, 8  # characters of its own, and times that it may write what it is given
ALL_WORDS = 100  # times that bound in all strings that it makes on the way, one after the other
TURNS, CALL = 10_000_000, 40  # turns of all its loops, and how many a call takes the time of
MOST_BITS = 4096  # of a whole number
_WIDTH = re.compile(r"\d{7,}")  # in a format: a field that wide


class OutOfBounds(Exception):
    """What a template would have made, in words."""


@dataclass
class _Left:
    """What the template that is being rendered may still do."""

    given: int
    words: int
    all_words: int
    turns: int = TURNS
    why: OutOfBounds | None = field(default=None)

    def fail(self, what: str) -> OutOfBounds:
        """Noted, since a template or its filters may swallow what is raised."""
        self.why = self.why or OutOfBounds(what)
        return self.why

    def take_turn(self, turns: int = 1) -> None:
        self.turns -= turns
        if self.turns < 0:
            raise self.fail("loops and calls itself millions of times")

    def take_words(self, count: int) -> None:
        self.all_words -= count
        if count > self.words or self.all_words < 0:
            raise self.fail(
                f"makes more than {self.words:,} characters of {self.given:,}, which would take for ever to read"
            )


_LEFT: ContextVar[_Left] = ContextVar("left")


def check_bounds(template: Template, given: int, variables: Mapping[str, Any]) -> None:
    """Render within bounds. Raises OutOfBounds; what else a template raises is for its own rendering to tell.

    template   as `bounded` makes it
    given      characters of the messages
    """
    words = OWN_WORDS + REPEATED * given
    left = _Left(given, words, ALL_WORDS * words)
    token = _LEFT.set(left)
    try:
        template.render(**variables)
    except Exception:
        if left.why is None:
            return
    finally:
        _LEFT.reset(token)
    if left.why is not None:
        raise left.why


@functools.lru_cache(maxsize=16)
def bounded(source: str, like: ImmutableSandboxedEnvironment) -> Template:
    """The template under bounds, in an environment like the library's own."""
    environment = _Bounded(
        trim_blocks=like.trim_blocks,
        lstrip_blocks=like.lstrip_blocks,
        extensions=[type(extension) for extension in like.extensions.values()],
    )
    environment.filters = {name: _looked_at(filter_) for name, filter_ in like.filters.items()}
    environment.globals = {**like.globals, "bounded_turns": _turns, "bounded_join": _join}
    return environment.from_string(source)


class _Bounded(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """What a template or a block of it has written."""
        return _join(*parts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _LEFT.get().take_words(_made_by(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902, N805
        _LEFT.get().take_turn(CALL)
        owner = getattr(__obj, "__self__", None)
        _look_at(getattr(__obj, "__name__", ""), [owner, *args, *kwargs.values()])
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """A text's own `format`, asked for here and called by whatever it is handed to."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _look_at("format", [value.__self__])
        return wrapped

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        _Looked().visit(source)
        return super()._generate(source, *args, **kwargs)


class _Looked(NodeTransformer):
    """Loops count their turns, and ~ is a call."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _call("bounded_turns", [node.iter], node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("bounded_join", node.nodes, node.lineno)


def _call(name: str, args: Sequence[nodes.Node], line: int) -> nodes.Call:
    call = nodes.Call(nodes.Name(name, "load"), list(args), [], None, None)
    call.set_lineno(line)
    return call


class _Turns:
    """What a loop goes over, counted; with its length where it has one, since loops ask."""

    def __init__(self, over: Any) -> None:
        self._over = over

    def __iter__(self) -> Iterator[Any]:
        left = _LEFT.get()
        for one in self._over:
            left.take_turn()
            yield one

    def __len__(self) -> int:
        return len(self._over)


def _turns(over: Any) -> Any:
    return _Turns(over)


def _join(*parts: Any) -> str:
    texts = [part if isinstance(part, str) else str(part) for part in parts]
    _LEFT.get().take_words(sum(map(len, texts)))
    return "".join(texts)


def _made_by(operator: str, left: Any, right: Any) -> int:
    """Characters, items or bits that an operator is about to make."""
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        return _number(operator, left, right)
    if operator == "%":
        _look_at("format", [left, *(right if isinstance(right, tuple) else [right])])
        return 0
    one, other = _size(left), _size(right)
    return one * other if operator == "*" else one + other


def _number(operator: str, left: float, right: float) -> int:
    if isinstance(left, float) or isinstance(right, float):
        return 0
    bits = left.bit_length() * (max(right, 0) if operator == "**" else 1) + right.bit_length()
    if bits > MOST_BITS:
        raise _LEFT.get().fail(f"works with numbers of more than {MOST_BITS:,} bits")
    return 0


def _size(value: Any) -> int:
    """Characters or items of it; a number is how often something is repeated."""
    if isinstance(value, int):
        return max(0, value)
    return len(value) if hasattr(value, "__len__") else 1


def _look_at(name: str, values: Iterable[Any]) -> None:
    """Before a filter, a method or a function runs: no wide fields, and nothing repeated out of bounds."""
    left, values = _LEFT.get(), list(values)
    for value in values:
        if isinstance(value, int) and value > OWN_WORDS:
            raise left.fail(f"asks {name or 'for something'} of {value:,}")
        if name in ("format", "do_format", "strftime_now") and isinstance(value, str) and _WIDTH.search(value):
            raise left.fail("asks for a field of millions of characters")
    texts = [value for value in values if isinstance(value, str)]
    if name in ("replace", "do_replace") and len(texts) > 2:
        left.take_words(len(texts[0]) + (texts[0].count(texts[1]) or 0) * len(texts[2]))
    elif name in ("join", "sync_do_join", "do_join"):
        left.take_words(_joined(values))
    elif name == "generate_lorem_ipsum" and any(isinstance(value, int) and value > 100 for value in values):
        raise left.fail("asks for so much filling text")


def _joined(values: Iterable[Any]) -> int:
    """Characters of the texts in lists, each with every text beside the lists between."""
    lists = [value for value in values if isinstance(value, (list, tuple))]
    between = sum(len(value) for value in values if isinstance(value, str))
    return sum(len(one) + between if isinstance(one, str) else between for each in lists for one in each)


def _looked_at(filter_: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose values are looked at first, and what it makes after."""

    @functools.wraps(filter_)
    def look(*args: Any, **kwargs: Any) -> Any:
        left = _LEFT.get()
        left.take_turn(CALL)
        _look_at(getattr(filter_, "__name__", ""), [*args, *kwargs.values()])
        made = filter_(*args, **kwargs)
        if isinstance(made, str):
            left.take_words(len(made))
        return made

    return look
