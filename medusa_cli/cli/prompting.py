"""Prompts of `medusa generate`: words, a pipe or a file, refused when empty before a model is loaded."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from medusa_cli.cli.streams import as_written
from medusa_cli.errors import DataError

if TYPE_CHECKING:
    from medusa_cli.data.conversations import Message


@dataclass(frozen=True)
class PromptSource:
    """Where prompts come from: a text, - for stdin, or a file; none of them: what is piped in."""

    text: str | None
    file: Path | None
    system: str | None
    chat: bool | None

    def read(self) -> "list[list[Message]]":
        """The messages of every prompt. Raises typer.BadParameter where there is none, DataError for a bad one."""
        from medusa_cli.data.conversations import Message
        from medusa_cli.data.prompts import read_prompts

        text, said = as_written(self.text), as_written(self.system)
        _check_text((text or "") + (said or ""))
        system = [Message("system", said)] if said else []
        if text is not None and self.file is not None:
            raise typer.BadParameter("give a prompt, or --prompt-file FILE, not both")
        if self.file is not None:
            return [system + list(one.messages) for one in read_prompts(self.file)]
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
