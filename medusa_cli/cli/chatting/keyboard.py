"""Turns typed at a terminal: lines that can be edited, a history to go back in, names that Tab completes."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from medusa_cli.cli.chatting.history import History, history_file
from medusa_cli.cli.chatting.turns_said import Said, next_turn
from medusa_cli.cli.console import Console
from medusa_cli.cli.signals import at_ctrl_c, interrupt
from medusa_cli.errors import MedusaError


class Keyboard:
    """Where somebody types. Where stdout is a terminal too, lines can be edited; Windows has no such library.

    commands   that Tab completes, each with its slash
    keep       whether what is typed is kept for the next conversation
    """

    def __init__(self, commands: Iterable[str], console: Console, *, keep: bool) -> None:
        self._commands, self._console = sorted(commands), console
        self._history: History | None = None
        self._edits = sys.stdout.isatty()
        if self._edits:
            with suppress(ImportError):
                self._set_up(keep)

    def next(self) -> Said | None:
        """The next turn, None where there is no more. Raises as `next_turn`, and KeyboardInterrupt at Ctrl-C."""
        said = next_turn(self._line)
        if said is not None and said.text.strip() and self._edits:
            self._remember(said)
        return said

    def _line(self, prompt: str) -> str | None:
        with at_ctrl_c(interrupt):
            return self._read(prompt)

    def _read(self, prompt: str) -> str | None:
        if not self._edits:  # the prompt is no part of what goes elsewhere
            print(prompt, end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
            return line.removesuffix("\n") if line else None
        try:
            return input(prompt)
        except EOFError:
            return None

    def _set_up(self, keep: bool) -> None:
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")  # a paste is one turn, however many lines it has
        readline.parse_and_bind("tab: complete")
        readline.set_completer_delims("")
        readline.set_completer(self._complete)
        readline.set_auto_history(False)
        if not keep:
            return
        try:
            self._history = History(history_file())
            for turn in self._history.read():
                readline.add_history(turn)
        except (OSError, MedusaError) as error:
            self._give_up(error)

    def _complete(self, begun: str, number: int) -> str | None:
        found = [name for name in self._commands if begun.startswith("/") and name.startswith(begun)]
        return found[number] if number < len(found) else None

    def _remember(self, said: Said) -> None:
        turn = f"/{said.text}" if said.is_command else said.text
        with suppress(ImportError):
            import readline

            readline.add_history(turn)
        try:
            if self._history is not None:
                self._history.add(turn)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError | MedusaError) -> None:
        """Go on without a history, and say so once."""
        self._history = None
        told = error.message if isinstance(error, MedusaError) else error.strerror
        self._console.warn(f"what is typed is not kept for the next conversation: {told}")


@contextmanager
def unechoed() -> Iterator[None]:
    """Inside, what is typed doesn't show on the terminal, where a reply is being written; the next line has it."""
    try:
        import termios
    except ImportError:
        yield
        return
    try:
        before = termios.tcgetattr(sys.stdin.fileno())
    except (termios.error, OSError, ValueError):
        yield
        return
    flags = 3
    # line by line, a Ctrl-D would be taken for an end that is gone by the time somebody reads
    silent = [*before[:flags], before[flags] & ~termios.ECHO & ~termios.ICANON, *before[flags + 1 :]]
    termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, before)
