"""Prompts of `medusa generate`: words, a pipe or a file, refused when empty before a model is loaded."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from medusa_cli.cli.streams import as_written
from medusa_cli.errors import DataError

if TYPE_CHECKING:
    from medusa_cli.data.conversations import Message


@dataclass(frozen=True)
class PromptSource:
    """Where prompts come from: a text, - for stdin, or a file; none of them: what is piped in."""

    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; none, or -, reads it from a pipe.", show_default=False)
    ] = None
    prompt_file: Annotated[
        Path | None,
        typer.Option("--prompt-file", metavar="FILE", help="Prompts from a .jsonl or .txt file, one by one."),
    ] = None
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Use the chat template. [default: where the model has one]")
    ] = None
    system_prompt: Annotated[str | None, typer.Option("--system-prompt", metavar="TEXT", help="A system message.")] = (
        None
    )

    def read(self) -> "list[list[Message]]":
        """The messages of every prompt. Raises typer.BadParameter where there is none, DataError for a bad one."""
        from medusa_cli.data.conversations import Message
        from medusa_cli.data.prompts import read_prompts

        text, said = as_written(self.prompt), as_written(self.system_prompt)
        _check_text((text or "") + (said or ""))
        system = [Message("system", said)] if said else []
        if text is not None and self.prompt_file is not None:
            raise typer.BadParameter("give a prompt, or --prompt-file FILE, not both")
        if self.prompt_file is not None:
            return [system + list(one.messages) for one in read_prompts(self.prompt_file)]
        alone = self._alone(text)
        # a plain text may be empty: models that have a first token of their own start from it
        if not alone.strip() and self.chat is not False:
            raise DataError("the prompt is empty", "write what is asked: medusa generate 'Name three planets.'")
        return [[*system, Message("user", alone)]]

    def _alone(self, text: str | None) -> str:
        """The one prompt: the text given, or what stdin holds."""
        if text is not None and text != "-":
            return text
        if text is None and sys.stdin.isatty():
            raise typer.BadParameter("give a prompt, pipe one in, or name a file with --prompt-file")
        piped = _read_stdin()
        if text is None and not piped:
            raise typer.BadParameter("give a prompt, pipe one in, or name a file with --prompt-file")
        return piped


def _check_text(text: str) -> None:
    """Raise DataError for bytes that are no text."""
    from medusa_cli.data.conversations import is_text

    if not is_text(text):
        raise DataError("the prompt is not UTF-8", "give it as UTF-8 text, or name a file with --prompt-file")


def _read_stdin() -> str:
    """All of stdin but its last line end, which `echo` and editors add. Raises DataError when it is no text."""
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"stdin is not UTF-8 ({error.reason})", "give the prompt as UTF-8 text") from error
    return text.removesuffix("\n").removesuffix("\r")
