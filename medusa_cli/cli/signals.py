"""Ctrl-C and SIGTERM while a run goes on: the first lets it keep what it has, the second ends it at once."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PATIENCE = b"\nstopping after this step; once more ends at once, without saving\n"


class Stops:
    """Entered around a run. Outside `between_steps`, the first signal raises KeyboardInterrupt where the run is."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._waits = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Stops":
        # a shell's background job ignores Ctrl-C, and only the main thread may say who hears signals
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._hear) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def asked(self) -> bool:
        """Whether a signal came."""
        return self.signal is not None

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal came: one that arrives inside a finalizer is lost there."""
        if self.asked():
            raise KeyboardInterrupt

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Inside, a signal only sets `asked`, which the run looks at where its state is whole."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False
        self.check()

    def _hear(self, number: int, _: FrameType | None) -> None:
        if self.asked():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.signal = number
        if not self._waits:
            raise KeyboardInterrupt
        # printing could meet a print that is under way
        os.write(2, _PATIENCE)


def interrupt() -> None:
    """Raise KeyboardInterrupt, as Ctrl-C does."""
    raise KeyboardInterrupt


@contextmanager
def at_ctrl_c(*answers: Callable[[], object]) -> Iterator[None]:
    """Inside, each Ctrl-C calls the next of these; those that come after the last change nothing."""
    left = iter(answers)

    def hear(number: int, _: FrameType | None) -> None:
        answer = next(left, None)
        if answer is not None:
            answer()

    before = signal.signal(signal.SIGINT, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
