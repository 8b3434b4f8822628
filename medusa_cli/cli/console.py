"""What a command prints, and where: results on stdout, progress and logs on stderr."""

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from medusa_cli.cli.drawing import Table, bar, draw_table, wrapped
from medusa_cli.errors import MedusaError
from medusa_cli.util.files import write_atomically
from medusa_cli.util.optional import with_this_pip

SECONDS_BETWEEN_LINES = 10.0


class GateFailed(MedusaError):
    """A gate the user asked for (`--min-speedup`, `--require-identical`) was not met: exit code 3."""


class Progress:
    """How far a long job is. `advance` is cheap enough for every step."""

    def __init__(self, draw: Callable[[float, str], None], done: float = 0.0) -> None:
        self.done = done
        self._draw = draw

    def advance(self, count: float = 1, note: str = "") -> None:
        """`count` more units are done; `note` is shown beside the bar: parts, the most telling first, by two spaces."""
        self.done += count
        self._draw(self.done, note)


# transformers imports torchao wherever it is installed, and that names every kernel it can't load
CHATTERING = ("torchao", "torch.utils._pytree")


class _Listener(logging.Handler):
    """Shows what rooms below the command line report, as lines of log; each warning once."""

    def __init__(self, show: Callable[[str], None], warn: Callable[[str], None]) -> None:
        super().__init__()
        self.show = show
        self._warn = warn
        self._warned: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.levelno < logging.WARNING:
            self.show(message)
        elif message not in self._warned:
            self._warned.add(message)
            self._warn(message)


class Console:
    """The two streams of one command.

    json     stdout holds one JSON document and nothing else: `out`, `stream` and `table` print nothing
    quiet    no progress and no `info`; warnings stay
    verbose  `debug` prints
    """

    def __init__(
        self,
        *,
        json: bool = False,
        quiet: bool = False,
        verbose: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.json = json
        self.quiet = quiet
        self.verbose = verbose
        self._clock = clock
        self._print_above_bar: Callable[[str], None] | None = None
        self._printed_json = False
        reports = logging.getLogger("medusa_cli")
        reports.setLevel(logging.DEBUG if verbose else logging.INFO)
        reports.handlers = [_Listener(self.info, self.warn)]
        for name in CHATTERING:
            logging.getLogger(name).setLevel(logging.ERROR)

    def info(self, message: str) -> None:
        """A line of log on stderr."""
        if not self.quiet:
            self._log(message)

    def aside(self, message: str) -> None:
        """A line of log on stderr that is less than what stands around it: dim on a terminal."""
        if not self.quiet:
            dim = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
            print(f"\x1b[2m{wrapped(message, sys.stderr)}\x1b[0m" if dim else message, file=sys.stderr, flush=True)

    def debug(self, message: str) -> None:
        """A line of log on stderr that only --verbose shows."""
        if self.verbose:
            self._log(message)

    def warn(self, message: str) -> None:
        """A line of log on stderr that --quiet doesn't hide."""
        self._log(f"warning: {message}")

    def out(self, text: str = "") -> None:
        """A line of the result on stdout."""
        if not self.json:
            print(text)

    def say(self, text: str, indent: int = 0) -> None:
        """Sentences of the result on stdout, broken between words where the terminal is narrower; see `wrapped`."""
        self.out(wrapped(text, sys.stdout, indent))

    def marked(self, runs: Sequence[tuple[str, bool]]) -> None:
        """Runs of text as a result on stdout: the marked ones between \u27e6 and \u27e7, and green on a terminal."""
        on, off = ("\x1b[32m", "\x1b[0m") if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else ("", "")
        self.out("".join(f"{on}\u27e6{text}\u27e7{off}" if marked else text for text, marked in runs))

    def stream(self, text: str) -> None:
        """A piece of the result on stdout, shown at once."""
        if not self.json:
            print(text, end="", flush=True)

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[object]],
        title: str = "",
        spare: Sequence[str] = (),
        cut: str = "",
    ) -> None:
        """Rows under named columns on stdout: numbers right-aligned, nothing cut off when the output is no terminal.

        spare, cut   as in `Table`; --verbose wraps them instead
        """
        if self.json:
            return
        cells = [[_cell(value) for value in row] for row in rows]
        left_out = draw_table(Table(columns, cells, title, *(((), "") if self.verbose else (spare, cut))))
        if left_out:
            names = ", ".join(name for name in columns if name in left_out)
            self.info(f"left out for want of room: {names}; --json has all columns")

    def print_json(self, document: object, output_file: Path | None = None) -> None:
        """The one result document: to `output_file` when named, and to stdout under --json.

        Dataclasses become objects, paths text, and numbers that JSON lacks (nan, inf) null.
        """
        text = json.dumps(_plain(document), indent=2, allow_nan=False)
        if output_file is not None:
            write_result(output_file, (text + "\n").encode())
        if self.json:
            assert not self._printed_json, "--json promises one document"
            self._printed_json = True
            print(text)

    def error(self, error: MedusaError) -> None:
        """The two lines of an error a command lives on from."""
        print_error(error.message, error.hint)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """A line on a terminal that says what is waited for, and goes when it is there; lines of log stand above it.

        It stands still: a bar that moves would take its share of what may be measured meanwhile.
        """
        if self.quiet or not sys.stderr.isatty() or self._print_above_bar:
            yield
            return

        def show(line: str = "") -> None:
            print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)

        def print_above(message: str) -> None:
            show(f"{wrapped(message, sys.stderr)}\n{what} …")

        show(f"{what} …")
        self._print_above_bar = print_above
        try:
            yield
        finally:
            self._print_above_bar = None
            show()

    @contextmanager
    def progress(self, title: str, total: float | None = None, done: float = 0.0) -> Iterator[Progress]:
        """A bar with the time left on a terminal; elsewhere a line at the start and then at most one each 10 s.

        `done` units were done by an earlier run, and say nothing about the time that the others take.
        """
        if self.quiet:
            yield Progress(lambda done, note: None, done)
        elif sys.stderr.isatty():
            with bar(title, total, done) as shown:
                self._print_above_bar = shown.print_above
                try:
                    yield Progress(shown.draw, done)
                finally:
                    self._print_above_bar = None
        else:
            yield Progress(self._lines(title, total, done), done)

    def _lines(self, title: str, total: float | None, before: float) -> Callable[[float, str], None]:
        """Draws progress as sparse lines of log; `before` is what an earlier run had done."""
        start = last = self._clock()

        def draw(done: float, note: str) -> None:
            nonlocal last
            now = self._clock()
            finished = total is not None and done >= total
            if now - last < SECONDS_BETWEEN_LINES and not (finished and last > start):
                return
            last = now
            parts = [f"{title}: {done:g}" if total is None else f"{title}: {done:g}/{total:g}"]
            if total is not None and before < done < total:
                parts.append(f"{duration((now - start) * (total - done) / (done - before))} left")
            self._log(", ".join(parts + [note] * bool(note)))

        self._log(title)
        return draw

    def _log(self, message: str) -> None:
        if self._print_above_bar:
            self._print_above_bar(message)
        else:
            print(wrapped(message, sys.stderr), file=sys.stderr, flush=True)


def print_error(message: str, hint: str) -> None:
    """`error:` and ` hint:`, one line each, whatever the texts hold."""
    print(f"error: {_one_line(message)}\n hint: {_one_line(with_this_pip(hint))}", file=sys.stderr)


def _one_line(text: str) -> str:
    """`text` without line breaks; other control characters, which could drive a terminal, are spelt out."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in " ".join(text.split()))


def span(seconds: float) -> str:
    """0.0063 -> 6 ms; 1.26 -> 1.3 s."""
    return f"{seconds:.1f} s" if seconds >= 0.95 else f"{max(1, round(1000 * seconds))} ms"


def duration(seconds: float) -> str:
    """87 -> 1:27."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it."""
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def write_result(file: Path, content: bytes) -> None:
    """Write a file the user named, so that a reader sees the old content or the new one.

    A link is followed, and a device or a pipe is written to: replacing it would take it away. Raises MedusaError.
    """
    try:
        if file.exists() and not file.is_file():
            file.write_bytes(content)
        else:
            write_atomically(Path(os.path.realpath(file)), content)
    except OSError as error:
        hint = "name a file in a folder you can write to"
        raise MedusaError(f"can't write {file}: {error.strerror}", hint) from error


def _cell(value: object) -> str:
    """A cell's text: floats to two decimals or none, thousands apart, None as a dash."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
