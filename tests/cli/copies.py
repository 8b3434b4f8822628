"""The program in a copy of this process: as real as any other, and torch is there already."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.cli.harness import ENOUGH, Done, run_here


class Copy:
    """One run of the program.

    stderr   file that takes what the run says there itself; what it has said by its end is in `ended().err`
    before   called in the copy first: to make something happen to it
    """

    def __init__(self, stderr: Path, *args: object, before: Callable[[], object]) -> None:
        context = multiprocessing.get_context("fork")
        self._stderr = stderr
        self._link, far = context.Pipe()

        def run() -> None:
            os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT), 2)
            # a shell's background job ignores interrupts, and so would this copy
            signal.signal(signal.SIGINT, signal.default_int_handler)
            before()
            far.send(run_here(*args))

        self.process = context.Process(target=run)
        self.process.start()
        far.close()  # one that dies is then at its end, and not waited for

    @property
    def said(self) -> str:
        """What it has said on stderr itself so far."""
        return self._stderr.read_text()

    def wait_for(self, happened: Callable[[], bool]) -> None:
        """Until something has happened; the run must not end before."""
        end = time.monotonic() + ENOUGH
        while not happened():
            assert self.process.is_alive(), "it ended before"
            assert time.monotonic() < end, "it never happened"
            time.sleep(0.001)

    def send(self, number: int) -> None:
        """A signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """As kill -9 does."""
        self.process.kill()
        self.process.join()

    def ended(self) -> Done:
        """How it ended, once it has by itself."""
        assert self._link.poll(ENOUGH), "it never ended"
        done = self._link.recv()
        self.process.join()
        return done
