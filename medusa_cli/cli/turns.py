"""What is shown while texts are written side by side: how far prompts are read, and replies in the prompts' order."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from medusa_cli.cli.console import Console, Progress

if TYPE_CHECKING:
    from medusa_cli.decode.text import TextStream

LONG_READING = 256  # tokens: reading fewer takes no time that anyone would wonder about
LONGEST_TITLE = 60  # characters of a prompt, in the line above its reply


@dataclass
class GrowingText:
    """One text that grows. The first `shown` of its pieces have been shown; `summary` is set when it is whole.

    begun, first    when its prompt was taken, and when its first token came
    """

    prompt: str
    stream: "TextStream"
    pieces: list[str] = field(default_factory=list)
    shown: int = 0
    begun: float = 0.0
    first: float = 0.0
    summary: str | None = None


def joining(prompts: Sequence[list[int]], texts: Sequence[GrowingText]) -> Iterator[list[int]]:
    """The prompts; each text's clock starts when the loop takes its prompt."""
    for prompt, text in zip(prompts, texts, strict=True):
        text.begun = time.perf_counter()
        yield prompt


class Reading:
    """Progress while long prompts are read; entered around the loop that reads them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = ExitStack()
        self._progress: Progress | None = None

    def __enter__(self) -> Callable[[int, int], None]:
        return self._read

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def _read(self, done: int, total: int) -> None:
        """So many tokens of so many are read."""
        if total < LONG_READING:
            return
        if self._progress is None:
            self._progress = self._bar.enter_context(self._console.progress("reading the prompt, tokens", total))
        self._progress.advance(done - self._progress.done)
        if done >= total:
            self._bar.close()
            self._progress = None


class Turns:
    """Shows the first text that isn't whole yet; those behind it wait for their turn. Several are told apart."""

    def __init__(self, console: Console, stream: bool, texts: Sequence[GrowingText]) -> None:
        self._console = console
        self._stream = stream
        self._texts = texts
        self._turn = 0
        self._headed = -1

    def take(self, key: int, piece: str) -> None:
        """A text has grown."""
        self._texts[key].pieces.append(piece)
        if key == self._turn and self._stream:
            self._show(self._texts[key])

    def end(self, key: int, summary: str) -> None:
        """A text is whole: show it if it is its turn, and what waited for it."""
        self._texts[key].summary = summary
        while self._turn < len(self._texts) and (line := self._texts[self._turn].summary) is not None:
            self._show(self._texts[self._turn])
            self._console.stream("\n")
            self._console.info(line)
            self._turn += 1
        if self._turn < len(self._texts) and self._stream and self._texts[self._turn].pieces:
            self._show(self._texts[self._turn])

    def _show(self, text: GrowingText) -> None:
        if self._headed < self._turn and len(self._texts) > 1:
            self._headed = self._turn
            above = "\n" if self._turn else ""
            self._console.stream(f"{above}--- {self._turn + 1} of {len(self._texts)}: {title(text.prompt)}\n")
        self._console.stream("".join(text.pieces[text.shown :]))
        text.shown = len(text.pieces)


def title(prompt: str) -> str:
    """The prompt on one line, cut where it is long; what could drive a terminal is left out."""
    line = "".join(char for char in " ".join(prompt.split()) if char.isprintable())
    return line if len(line) <= LONGEST_TITLE else f"{line[: LONGEST_TITLE - 1]}…"
