"""Copies of the program that die at a moment of one's choice, and the places in its code where files are changed."""

import contextlib
import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.cli.harness import run_here

ROOT = Path(__file__).parents[1] / "medusa_cli"
Site = tuple[str, int]
"""A line: its file and number."""


@dataclass(frozen=True)
class Ended:
    """How a copy of the program ended: an exit code, or minus the signal; and what it said."""

    code: int
    said: str


@dataclass
class Death:
    """When a copy dies. `arm` is called in it; `after` is how long the parent waits before it kills, if it does.

    refused   it doesn't die, but must end in order with an error
    """

    words: str
    arm: Callable[[], None] = lambda: None
    after: float | None = None
    site: Site | None = None
    refused: bool = False


def die() -> None:
    """As by kill -9."""
    os.kill(os.getpid(), signal.SIGKILL)


def at_line(site: Site, times: int, codes: frozenset[CodeType]) -> Death:
    """Before this line is reached for the so-many-th time."""
    left = [times]

    def line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and (frame.f_code.co_filename, frame.f_lineno) == site:
            left[0] -= 1
            if not left[0]:
                die()
        return line

    def call(frame: FrameType, *_: Any) -> Any:
        return line if frame.f_code in codes and frame.f_code.co_filename == site[0] else None

    return Death(f"line {shown(site)}", lambda: sys.settrace(call), site=site)


def at_byte(size: int) -> Death:
    """When a file would grow past so many bytes: what fits is written, then the system ends the process."""

    def arm() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return Death(f"byte {size}", arm)


def when_full(size: int) -> Death:
    """When a file would grow past so many bytes, which is then refused."""

    def arm() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        del os.environ["MEDUSA_TRACEBACK"]  # what the user sees is looked at

    return Death(f"full {size}", arm, refused=True)


def at_time(seconds: float) -> Death:
    return Death(f"time {seconds:.2f} s", after=seconds)


def shown(site: Site) -> str:
    return f"{Path(site[0]).relative_to(ROOT)}:{site[1]}"


def attempt(args: Sequence[object], death: Death | None = None) -> Ended:
    """The program in a copy of this process, to its end or its death."""
    sys.stdout.flush()
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            os.close(reading)
            if death:
                death.arm()
            done = run_here(*args)
            sys.settrace(None)
            os.write(writing, (done.out + done.err)[-4000:].encode())
            os._exit(done.code)
        os._exit(99)
    os.close(writing)
    if death and death.after is not None and not select.select([reading], [], [], death.after)[0]:
        os.kill(pid, signal.SIGKILL)
    with open(reading, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    return Ended(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said)


class Watched:
    """Learns from unbroken runs which code files are written from, and which of its lines are reached, in order."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()
        self.lines: dict[Site, int] = {}
        self._folder = ""
        sys.addaudithook(self._audit)

    def writers(self, folder: Path, run: Callable[[], object]) -> None:
        """Note every function of the program that was under way when something in `folder` was changed."""
        real = {name: getattr(os, name) for name in ("write", "fsync")}

        def noted(name: str) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                self._note()
                return real[name](*args)

            return call

        self._folder = str(folder)
        for name in real:
            setattr(os, name, noted(name))
        try:
            run()
        finally:
            self._folder = ""
            for name, function in real.items():
                setattr(os, name, function)

    def count(self, run: Callable[[], object]) -> None:
        """Count how often each line of these functions is reached."""

        def line(frame: FrameType, event: str, _: Any) -> Any:
            if event == "line":
                site = (frame.f_code.co_filename, frame.f_lineno)
                self.lines[site] = self.lines.get(site, 0) + 1
            return line

        sys.settrace(lambda frame, *_: line if frame.f_code in self.codes else None)
        try:
            run()
        finally:
            sys.settrace(None)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._folder or threading.current_thread() is not threading.main_thread():
            return
        changes = event in ("os.rename", "os.remove", "os.mkdir", "os.chmod", "os.truncate", "os.utime")
        if event == "open":
            changes = bool(args[2] & (os.O_WRONLY | os.O_RDWR)) if isinstance(args[2], int) else False
        if changes and any(str(arg).startswith(self._folder) for arg in args if isinstance(arg, str | Path)):
            self._note()

    def _note(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename.startswith(f"{ROOT}/"):
                self.codes.add(frame.f_code)
            frame = frame.f_back
