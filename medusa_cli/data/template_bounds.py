"""Bounds for chat templates: how much one may make, loop and call. A template is a program that came with a model.

A template is first rendered here, under bounds; what passes is rendered by the library, whose text counts. Whatever
takes time or memory is looked at before it runs, by the size of what it is given and of what it may make.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from jinja2 import nodes
from jinja2.environment import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from medusa_cli.data.template_sizes import (
    GROWING,
    JOINING,
    MOST_BITS,
    made_by_call,
    made_by_format,
    made_by_operator,
    passes_of,
    size,
)  # fmt: skip

OWN_WORDS, REPEATED = 1_000_000, 8  # characters of its own, and times that it may write what it is given
ALL_WORDS = 100  # times that bound in all strings that it makes on the way, one after the other
TURNS, CALL = 4_000_000, 40  # turns of all its loops, and how many a call takes the time of
OWN_TURNS = 100  # and more turns for each character that it is given
TURN = 4  # characters that are gone over in the time of a turn
MOST_DIGITS, LONGEST_DATE = 400, 1000  # to round to; of a format of dates
_DATE = "strftime_now"


class OutOfBounds(Exception):
    """What a template would have made, in words."""


@dataclass
class _Left:
    """What the template that is being rendered may still do."""

    given: int
    words: int
    all_words: int
    turns: int
    why: OutOfBounds | None = field(default=None)

    def fail(self, what: str) -> OutOfBounds:
        """Noted, since a template or its filters may swallow what is raised."""
        self.why = self.why or OutOfBounds(what)
        return self.why

    def take_turns(self, turns: int) -> None:
        self.turns -= turns
        if self.turns < 0:
            raise self.fail("loops and calls itself millions of times")

    def take_words(self, count: int) -> None:
        self.all_words -= count
        if count > self.words or self.all_words < 0:
            raise self.fail(
                f"makes more than {self.words:,} characters of {self.given:,}, which would take for ever to read"
            )

    def look_over(self, values: Iterable[Any], passes: int = 1) -> None:
        """Time for going over these values, so often."""
        for value in values:
            count = len(value) if type(value) is str else size(value, self.words)
            if count > self.words:
                self.take_words(count)
            if count >= TURN:
                self.take_turns(passes * (count // TURN))


_LEFT: ContextVar[_Left] = ContextVar("left")


def check_bounds(template: Template, given: int, variables: Mapping[str, Any]) -> None:
    """Render within bounds. Raises OutOfBounds; what else a template raises is for its own rendering to tell.

    template   as `bounded` makes it
    given      characters of the messages
    """
    words = OWN_WORDS + REPEATED * given
    left = _Left(given, words, ALL_WORDS * words, TURNS + OWN_TURNS * given)
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
    environment.filters = {name: _looked_at(each) for name, each in like.filters.items()}
    tests: Mapping[str, Any] = like.tests
    environment.tests = {name: _looked_at(each) for name, each in tests.items()}
    own = {"bounded_turns": _turns, "bounded_join": _join, "bounded_look": _look}
    environment.globals = {**like.globals, **own}
    return environment.from_string(source)


class _Bounded(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """What a template or a block of it has written."""
        left, written, length = _LEFT.get(), [], 0
        for part in parts:
            written.append(part)
            length += len(part)
            if length > left.words:
                break
        left.take_turns(len(written))
        left.take_words(length)
        return "".join(written)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        bound = _LEFT.get()
        made = made_by_operator(operator, left, right, bound.words)
        if made > bound.words and isinstance(left, int) and isinstance(right, int):
            raise bound.fail(f"works with numbers of more than {MOST_BITS:,} bits")
        bound.take_words(made)
        bound.take_turns(made // TURN)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902, N805
        if __obj is _turns or __obj is _join or __obj is _look:
            return __obj(*args)
        name, owner = getattr(__obj, "__name__", ""), getattr(__obj, "__self__", None)
        args = _gathered(name, args)
        _check_call(name, [*([] if owner is None else [owner]), *args, *_own(kwargs)])
        return _made(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """A text's own `format`, whoever calls it."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @functools.wraps(wrapped)
        def look(*args: Any, **kwargs: Any) -> str:
            left, values = _LEFT.get(), [*args, *kwargs.values()]
            left.take_words(made_by_format(value.__self__, values, left.words))
            return wrapped(*args, **kwargs)

        return look

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        _Looked().visit(source)
        return super()._generate(source, *args, **kwargs)


class _Looked(NodeTransformer):
    """Loops count their turns, ~ is a call, and what is compared, cut out of another or shown is looked at."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _call("bounded_turns", [node.iter], node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("bounded_join", node.nodes, node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _looked(node.expr)
        for operand in node.ops:
            operand.expr = _looked(operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _looked(node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [one if isinstance(one, nodes.TemplateData) else _looked(one) for one in node.nodes]
        return node


def _call(name: str, args: Sequence[nodes.Node], line: int) -> nodes.Call:
    call = nodes.Call(nodes.Name(name, "load"), list(args), [], None, None)
    call.set_lineno(line)
    return call


def _looked(node: Any) -> Any:
    """The same, looked at when it is known; a word in the template itself needs no look."""
    return node if isinstance(node, nodes.Const) else _call("bounded_look", [node], node.lineno)


class _Turns:
    """What is gone over one by one, counted; with its length where it has one, since loops ask."""

    def __init__(self, over: Any, each: int) -> None:
        self._over = over
        self._each = each

    def __iter__(self) -> Iterator[Any]:
        left = _LEFT.get()
        for one in self._over:
            left.take_turns(self._each)
            yield one

    def __len__(self) -> int:
        return len(self._over)


def _turns(over: Any) -> Any:
    return _Turns(over, 1)


def _look(value: Any) -> Any:
    _LEFT.get().look_over([value])
    return value


def _join(*parts: Any) -> str:
    left = _LEFT.get()
    left.look_over(parts)
    texts = [part if isinstance(part, str) else str(part) for part in parts]
    left.take_words(sum(map(len, texts)))
    return "".join(texts)


def _own(kwargs: Mapping[str, Any]) -> list[Any]:
    """Arguments by name, without those that jinja adds."""
    return [value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")]


def _gathered(name: str, args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments; of a join, with what comes one by one as a list, so that it can be counted before."""
    if name not in JOINING:
        return tuple(args)
    return tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)


def _check_call(name: str, values: Sequence[Any]) -> None:
    """Before a filter, a test, a method or a function runs: the time it takes and what it makes."""
    left = _LEFT.get()
    left.take_turns(CALL)
    for value in values:
        if isinstance(value, int) and value > (MOST_DIGITS if name == "do_round" else OWN_WORDS):
            raise left.fail(f"asks {name or 'for something'} of {value:,}")
    if name == "generate_lorem_ipsum":
        raise left.fail("asks for filling text")
    if name == _DATE and any(isinstance(value, str) and len(value) > LONGEST_DATE for value in values):
        raise left.fail("asks for a date of thousands of words")
    left.look_over(values, passes_of(name, values, left.words))
    if name in ("format", "do_format", _DATE) and values:
        left.take_words(made_by_format(values[0], values[1:], left.words))
    elif name in GROWING and (made := made_by_call(name, values, left.words)) > left.words:
        left.take_words(made)


def _made(value: Any) -> Any:
    """What was made, counted; what comes one by one is counted when it comes."""
    left = _LEFT.get()
    if isinstance(value, Iterator):
        return iter(_Turns(value, CALL))
    if isinstance(value, str):
        left.take_words(len(value))
    left.look_over([value])
    return value


def _looked_at(each: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or a test that is looked at before and after."""
    name = getattr(each, "__name__", "")

    @functools.wraps(each)
    def look(*args: Any, **kwargs: Any) -> Any:
        args = _gathered(name, args)
        skipped = 1 if getattr(each, "jinja_pass_arg", None) else 0
        _check_call(name, [*args[skipped:], *kwargs.values()])
        return _made(each(*args, **kwargs))

    return look
