"""What can be said to the program in a conversation: /help, /save and so on."""

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from medusa_cli.cli.chatting.loop import Chat
from medusa_cli.cli.chatting.settings import changed, listed
from medusa_cli.errors import DataError


@dataclass(frozen=True)
class Command:
    """One command. `do` gets the words after its name; `words`: what they stand for, "" where there are none."""

    words: str
    what: str
    do: Callable[[Chat, str], None]


def obey(chat: Chat, said: str) -> bool:
    """Do what a command says; False for the one that leaves. Raises DataError for one that nobody knows."""
    name, _, words = said.partition(" ")
    if name == "exit":
        return False
    command = COMMANDS.get(name)
    if command is None:
        near = difflib.get_close_matches(name, [*COMMANDS, "exit"], n=1)
        meant = f"did you mean /{near[0]}? " if near else ""
        raise DataError(f"there is no command /{name}", f"{meant}/help lists them; a turn that begins with / needs //")
    if words.strip() and not command.words:
        raise DataError(f"/{name} takes no words", f"/{name} {command.what}")
    command.do(chat, words.strip())
    return True


def names() -> Iterator[str]:
    """All commands with their slash."""
    yield from (f"/{name}" for name in [*COMMANDS, "exit"])


def _help(chat: Chat, _: str) -> None:
    width = max(len(f"/{name} {command.words}") for name, command in COMMANDS.items()) + 2
    for name, command in COMMANDS.items():
        chat.console.say(f"{f'/{name} {command.words}':{width}}{command.what}", width)
    chat.console.say(f"{'/exit':{width}}leaves, as Ctrl-D does", width)
    chat.console.say(
        'A line that ends with \\ goes on; """ begins and ends a turn of several lines; // begins a turn with a slash. '
        "Ctrl-C stops a reply, of which the part that is there stays in the conversation."
    )


def _reset(chat: Chat, _: str) -> None:
    chat.talk.reset()
    chat.console.aside("forgotten; the system message stays" if chat.talk.system else "forgotten")


def _retry(chat: Chat, _: str) -> None:
    chat.ask_again()


def _save(chat: Chat, name: str) -> None:
    _keep(chat, name, over=False)


def _save_over(chat: Chat, name: str) -> None:
    _keep(chat, name, over=True)


def _keep(chat: Chat, name: str, *, over: bool) -> None:
    named = name or (str(chat.talk.file) if chat.talk.file else "")
    if not named:
        raise DataError("/save needs the name of a file", "/save talk.jsonl")
    file = chat.talk.save(named, over=over)
    chat.console.aside(f"saved: {len(chat.talk.turns)} messages in {file}")


def _load(chat: Chat, name: str) -> None:
    if not name:
        raise DataError("/load needs the name of a file", "/load talk.jsonl")
    chat.talk.load(name)
    waits = "; its last question has no answer yet, /retry asks it" if chat.talk.unanswered else ""
    chat.console.aside(f"loaded: {len(chat.talk.turns)} messages{waits}")


def _system(chat: Chat, text: str) -> None:
    if not text:
        chat.console.say(chat.talk.system or "there is no system message")
        return
    wanted = None if text == "-" else text
    chat.partner.check(chat.manner, wanted)
    chat.talk.system = wanted
    chat.console.aside("from the next reply on")


def _set(chat: Chat, words: str) -> None:
    if not words:
        for name, value in listed(chat.manner):
            chat.console.out(f"{name:20} {'-' if value is None else value}")
        return
    chat.manner = changed(chat.manner, words, lambda manner: chat.partner.check(manner, chat.talk.system))
    chat.console.aside("from the next reply on")


def _stats(chat: Chat, _: str) -> None:
    told = [reply for reply in chat.replies if reply.completion_tokens is not None]
    tokens = sum(reply.completion_tokens or 0 for reply in told)
    steps = sum(reply.num_steps or 0 for reply in told)
    seconds = sum(reply.duration for reply in chat.replies)
    chat.console.say(f"{chat.partner.name}: replies {len(chat.replies)}, tokens {tokens:,}, {seconds:.1f} s")
    if steps:
        chat.console.say(f"{sum(reply.stepped for reply in told) / steps:.2f} tokens a step")
    if told and chat.talk.turns:
        held = (told[-1].prompt_tokens or 0) + (told[-1].completion_tokens or 0)
        most = f" of {chat.partner.context:,}" if chat.partner.context else ""
        chat.console.say(f"the context held {held:,}{most} tokens at the last reply's end")


COMMANDS = {
    "help": Command("", "lists these", _help),
    "reset": Command("", "forgets the conversation", _reset),
    "retry": Command("", "asks the last question again; its reply is forgotten", _retry),
    "save": Command("FILE", "writes the conversation as a line of .jsonl", _save),
    "save!": Command("FILE", "the same, whatever the file holds", _save_over),
    "load": Command("FILE", "goes on with the conversation in a file", _load),
    "system": Command("TEXT", "sets the system message; - removes it, no text shows it", _system),
    "set": Command("NAME VALUE", "sets a flag, such as temperature 0.7; alone it lists them", _set),
    "stats": Command("", "says what the replies so far took", _stats),
}
