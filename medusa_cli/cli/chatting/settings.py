"""`/set NAME VALUE` in a conversation: read as the command line reads the flag of that name."""

import difflib
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import typer

from medusa_cli.cli.chatting.reply import Manner
from medusa_cli.cli.flags import taken_apart
from medusa_cli.cli.wishes import ChoosingFlags, EndingFlags
from medusa_cli.errors import RecipeError


def listed(manner: Manner) -> Iterator[tuple[str, object]]:
    """Each setting by its flag's name, with its value."""
    for part in (manner.choosing, manner.ending):
        for field in fields(part):
            yield field.name.replace("_", "-"), getattr(part, field.name)


def changed(manner: Manner, words: str, check: Callable[[Manner], None]) -> Manner:
    """The manner with one setting as "temperature 0.7" says, or "ignore-eos true". Raises RecipeError.

    check   raises typer.BadParameter or MedusaError for one that can't be followed
    """
    name, _, value = words.strip().partition(" ")
    name, value = name.lstrip("-").replace("_", "-"), value.strip()
    known = [setting for setting, _ in listed(manner)]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise RecipeError(f"there is no setting {name}", f"{meant}/set alone lists them")
    try:
        given = _parsed(name, value)
        found = {field: given[field] for field in given if field.replace("_", "-") == name}
        ours = [replace(part, **_of(part, found)) for part in (manner.choosing, manner.ending)]
        changed = Manner(ours[1], ours[0], manner.seed)  # type: ignore[arg-type]
        check(changed)
    except typer.TyperException as error:
        told = " ".join(error.format_message().split()).rstrip(".")
        raise RecipeError(told[:1].lower() + told[1:], "/set alone lists the settings") from error
    return changed


def _parsed(name: str, value: str) -> dict[str, Any]:
    """The values of all settings, this one as it was given. Raises typer.TyperException."""

    def settings(*, choosing: ChoosingFlags, ending: EndingFlags) -> None:
        """Never called: its flags are what is wanted."""

    app = typer.Typer(add_completion=False)
    app.command("set")(taken_apart(settings))
    command: Any = typer.main.get_command(app)
    switches = {option for each in command.params for option in each.opts if getattr(each, "is_flag", False)}
    flag = f"--{name}"
    if flag in switches:
        if value not in ("true", "false"):
            raise typer.BadParameter(f"{name} is true or false")
        args = [flag] if value == "true" else []
    else:
        args = [flag, value] if value else [flag]
    context = command.make_context("/set", args)
    return dict(context.params)


def _of(part: Any, found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name in {field.name for field in fields(part)}}
