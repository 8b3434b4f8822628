"""Groups of flags: one parameter of a command stands for several flags, a recipe's settings or a dataclass's fields."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any, get_args, get_type_hints

import typer

from medusa_cli.config.loading import all_fields

_METAVARS = {int: "N", float: "X"}


class RecipeFlags:
    """A flag for each of these settings: type, help and default are those of the recipe's field. The command gets the
    values by dotted name, as `load_recipe(values=...)` takes them; None stays None: not given.

    words      the flag of a setting, where it isn't the last part of its name
    metavars   what stands for the value in the help, where the type doesn't say it
    """

    def __init__(self, *settings: str, words: dict[str, str] | None = None, metavars: dict[str, str] | None = None):
        words = words or {}
        self.names = {words.get(name, name.rpartition(".")[2]): name for name in settings}
        self._metavars = metavars or {}

    def parameters(self) -> Iterable[inspect.Parameter]:
        """One for each flag, as Typer reads them."""
        fields = all_fields()
        for flag, name in self.names.items():
            field = fields[name]
            kind: Any = field.annotation
            kinds = set(get_args(kind)) or {kind}
            metavar = self._metavars.get(flag, next((_METAVARS[one] for one in kinds if one in _METAVARS), None))
            text = field.title if field.default is None else f"{field.title} [default: {field.default}]"
            dashed = f"--{flag.replace('_', '-')}"
            option = typer.Option(*_spelt(dashed, kind), metavar=metavar, help=text)
            yield _parameter(flag, Annotated[kind | None, option], None)

    def gather(self, values: dict[str, Any]) -> dict[str, Any]:
        """The values by dotted name."""
        return {name: values[flag] for flag, name in self.names.items()}


_SHORT = {"--model": "-m", "--output-dir": "-o"}


def _spelt(flag: str, kind: Any) -> tuple[str, ...]:
    """All spellings of a flag."""
    if kind is bool:
        return (f"{flag}/--no-{flag[2:]}",)
    return (flag, _SHORT[flag]) if flag in _SHORT else (flag,)


@dataclasses.dataclass(frozen=True)
class _Fields:
    """The flags that a dataclass's annotations spell, in the order of its fields; the command gets the dataclass."""

    kind: type[Any]

    def parameters(self) -> Iterable[inspect.Parameter]:
        """One for each field."""
        hints = get_type_hints(self.kind, include_extras=True)
        for field in dataclasses.fields(self.kind):
            yield _parameter(field.name, hints[field.name], field.default)

    def gather(self, values: dict[str, Any]) -> Any:
        """The dataclass with these values."""
        return self.kind(**{field.name: values[field.name] for field in dataclasses.fields(self.kind)})


def taken_apart(command: Callable[..., None]) -> Callable[..., None]:
    """The command as Typer is to see it: a parameter that is a dataclass or annotated with RecipeFlags is its flags."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, RecipeFlags | _Fields] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        group = _group(hints[name])
        if group is None:
            parameters.append(_parameter(name, hints[name], parameter.default))
        else:
            groups[name] = group
            parameters += group.parameters()
    own = [name for name in inspect.signature(command).parameters if name not in groups]

    def run(**values: Any) -> None:
        command(
            **{name: values[name] for name in own}, **{name: group.gather(values) for name, group in groups.items()}
        )

    run.__doc__ = command.__doc__
    run.__name__ = command.__name__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _group(hint: Any) -> RecipeFlags | _Fields | None:
    """The flags a parameter stands for; None for one that is a flag itself."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _Fields(hint)
    return next((part for part in get_args(hint) if isinstance(part, RecipeFlags)), None)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
