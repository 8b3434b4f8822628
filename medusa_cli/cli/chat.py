"""`medusa chat`: a conversation in the terminal, with the engine in this process or with a server."""

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medusa_cli.cli import options
from medusa_cli.cli.console import Console
from medusa_cli.cli.signals import at_ctrl_c
from medusa_cli.cli.streams import as_written
from medusa_cli.cli.wishes import ChoosingFlags, EndingFlags
from medusa_cli.errors import DataError

if TYPE_CHECKING:
    from medusa_cli.cli.chatting.here import Here
    from medusa_cli.cli.chatting.loop import Chat
    from medusa_cli.cli.chatting.remote import Remote
    from medusa_cli.cli.chatting.reply import Manner
    from medusa_cli.cli.chatting.turns_said import Said
    from medusa_cli.config.recipe import Recipe

KEY_VARIABLE = "MEDUSA_API_KEY"


@dataclass(frozen=True)
class Talking:
    """With whom, and what is said first."""

    system_prompt: Annotated[str | None, typer.Option("--system-prompt", metavar="TEXT", help="A system message.")] = (
        None
    )
    url: Annotated[
        str | None,
        typer.Option(
            "--url", metavar="URL", help="A server that speaks OpenAI's API, as medusa serve does. [default: none]"
        ),
    ] = None
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar=KEY_VARIABLE, metavar="KEY", help="The key for --url.")
    ] = None
    history: Annotated[
        bool, typer.Option("--history/--no-history", help="Keep what is typed, to go back to with the arrow keys.")
    ] = True


def command(
    *,
    talking: Talking,
    ending: EndingFlags,
    wanted: ChoosingFlags,
    guessing: options.Guessing,
    drafter: Annotated[
        str | None,
        options.drafter("Who guesses. [default: mixed where heads are known, else none]"),
    ] = None,
    target: options.Seeded,
    threads: options.Threads = None,
    config: options.Config = None,
    output: options.Output,
) -> None:
    """Talk with the model: replies are shown as they are written, and lines from a pipe are turns."""
    from medusa_cli.config.loading import load_recipe

    typed = sys.stdin.isatty()
    if output.json and typed:
        raise typer.BadParameter("--json prints one document at the end: pipe the turns in, or use --output-json FILE")
    _check_usage(talking, guessing, drafter, target)
    recipe = load_recipe(config, (), target)
    from medusa_cli.cli.chatting.reply import Manner

    manner, console = Manner(ending, wanted, recipe.seed), output.console
    manner.check()
    system = _system_message(talking.system_prompt)
    if talking.url is not None:
        partner: AbstractContextManager[Here | Remote] = _server(talking, target["target.model"])
    else:
        partner = _engine(recipe, guessing, drafter, manner, console)
    with partner as ready:
        from medusa_cli.cli.chatting.loop import Chat
        from medusa_cli.cli.chatting.talk import Talk

        ready.check(manner, system)
        chat = Chat(ready, manner, Talk(system), console, typed=typed)
        _converse(chat, output, keep=talking.history)


def _check_usage(talking: Talking, guessing: options.Guessing, drafter: str | None, target: dict[str, Any]) -> None:
    """Raise typer.BadParameter for flags that would do nothing."""
    if talking.url is None:
        if talking.api_key and talking.api_key != os.environ.get(KEY_VARIABLE):
            raise typer.BadParameter("--api-key is for --url, which isn't given")
        return
    fresh = options.Guessing()
    given = [field.name for field in fields(guessing) if getattr(guessing, field.name) != getattr(fresh, field.name)]
    given += ["drafter"] if drafter is not None else []
    given += [name.rpartition(".")[2] for name in target if target[name] is not None and name not in _OF_A_SERVER]
    if given:
        listed = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise typer.BadParameter(f"{listed}: a server has its own; leave it out beside --url")


_OF_A_SERVER = ("target.model", "seed")


def _system_message(given: str | None) -> str | None:
    from medusa_cli.data.conversations import is_text

    text = as_written(given)
    if text and not is_text(text):
        raise DataError("the system message is not UTF-8", "give it as UTF-8 text")
    return text or None


def _server(talking: Talking, model: str | None) -> "Remote":
    """The server that was named. Raises DataError where it can't be asked."""
    from medusa_cli.util.optional import need

    need("httpx", "serve")
    from medusa_cli.cli.chatting.remote import Remote

    assert talking.url is not None
    return Remote(talking.url, model, talking.api_key)


def _engine(
    recipe: "Recipe", guessing: options.Guessing, drafter: str | None, manner: "Manner", console: Console
) -> "Here":
    """The model, loaded."""
    from medusa_cli.assemble import check_choice
    from medusa_cli.choosing import Sampling, check_sampling
    from medusa_cli.cli.chatting.here import Here
    from medusa_cli.cli.parts import load_parts, own_stops

    sampling = Sampling(**vars(manner.choosing))
    check_sampling(sampling)
    choice = guessing.choice(drafter)
    check_choice(choice, recipe.target.model)
    with console.waiting(f"loading {recipe.target.model}"):
        parts = load_parts(recipe, choice, sampling, console)
    return Here(parts, own_stops(parts, console), console)


def _converse(chat: "Chat", output: options.Output, *, keep: bool) -> None:
    """Until it ends. The document is written however that was: what was said is worth as much after a mistake."""
    from medusa_cli.cli.chatting import commands

    if chat.typed:
        chat.console.aside(f"{chat.partner.name}; /help lists commands, Ctrl-D leaves")
    try:
        # at a terminal Ctrl-C means a line, or a reply; what is done between these is done whole
        with at_ctrl_c() if chat.typed else nullcontext():
            chat.run(_turns(chat, keep), commands.obey)
    finally:
        chat.console.print_json(chat.document(), output.output_json)


def _turns(chat: "Chat", keep: bool) -> "Callable[[], Said | None]":
    """Where turns come from."""
    from medusa_cli.cli.chatting.commands import names
    from medusa_cli.cli.chatting.keyboard import Keyboard
    from medusa_cli.cli.chatting.turns_said import next_turn, piped

    if chat.typed:
        return Keyboard(names(), chat.console, keep=keep).next
    lines = piped(sys.stdin.buffer)
    return lambda: next_turn(lines)
