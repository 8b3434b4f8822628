"""One engine for several callers: threads, and streams that are read in turn, write side by side on it.

Whoever waits for a text takes the next step, for all texts that are being written; what others gain is kept for them.
"""

from collections import deque
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import Lock

from medusa_cli.contracts import Drafter
from medusa_cli.decode.debug import watching
from medusa_cli.decode.engine import Engine, Gain, Request, Stats
from medusa_cli.decode.memory import free_columns
from medusa_cli.errors import DataError
from medusa_cli.model.target import Target


@dataclass(eq=False)
class _Call:
    """What a caller's texts have gained and he hasn't seen: each gain with its request's index.

    left   his texts that aren't whole yet; a row that was finished since says so in its earlier gains too
    lost   a step broke off that his texts were in
    """

    keys: range
    left: int
    gains: deque[tuple[int, Gain]] = field(default_factory=deque)
    lost: bool = False


class SharedEngine:
    """Writes texts for whoever asks, up to `max_rows` side by side. All of it may be called from any thread."""

    def __init__(self, target: Target, drafter: Drafter, max_rows: int) -> None:
        self._target, self._drafter, self._max_rows = target, drafter, max_rows
        self._lock = Lock()
        self._open = ExitStack()
        self._watches = self._open.enter_context(watching(target))
        # Calls that were given up. Python may close an iterator at any place, in the middle of a step too, where nobody
        # can wait for the lock: so it is noted here, and the next who holds the lock sees to it.
        self._given_up: deque[_Call] = deque()
        self._begin_anew()

    def write(self, requests: Sequence[Request]) -> Generator[tuple[int, Gain], None, None]:
        """The gains of texts of the same limits as they come, each with its request's index.

        Closed before the texts' ends, it frees their rows. Nothing is asked before the first gain is. Raises DataError
        or TargetError for a prompt that can't be asked, before anything is computed, and TargetError where logits are
        not finite.
        """
        if not requests:
            return
        call = self._ask(requests)
        try:
            while call.left or call.gains:
                for index, gain in self._gained(call):
                    if gain.row.error is not None:
                        raise gain.row.error
                    yield index, gain
        finally:
            self._given_up.append(call)
            if self._lock.acquire(blocking=False):
                try:
                    self._free_rows()
                finally:
                    self._lock.release()

    def stats(self) -> Stats:
        """What the engine holds, and has done since it was idle."""
        with self._lock:
            self._free_rows()
            return self._engine.stats()

    def _ask(self, requests: Sequence[Request]) -> _Call:
        """Ask for texts, all of them or none."""
        limits = requests[0].limits
        with self._lock:
            self._free_rows()
            if self._engine.idle:  # the memory of earlier texts, longer or more of them, is free again
                self._begin_anew()
                prompts = [request.prompt for request in requests]
                self._begin_anew(free_columns(self._target, prompts, limits, self._max_rows, self._drafter))
            for number, request in enumerate(requests, start=1):
                self._engine.check(request, f"prompt {number}" if len(requests) > 1 else "the prompt")
            keys = [self._engine.add(request) for request in requests]
            call = _Call(range(keys[0], keys[-1] + 1), len(keys))
            self._calls.append(call)
            return call

    def _gained(self, call: _Call) -> list[tuple[int, Gain]]:
        """What these texts have gained; a step is taken where that is nothing. Raises DataError when they are lost."""
        with self._lock:
            self._free_rows()
            if not call.gains:
                if call.lost:
                    raise DataError("the text is lost: a step that it shared with others broke off", "ask for it again")
                self._step()
            found = list(call.gains)
            call.gains.clear()
            return found

    def _step(self) -> None:
        """One step, for everybody."""
        try:
            gains = self._engine.step()
        except BaseException:  # whatever it was, the cache may be half written: nothing that is in it goes on
            for call in self._calls:
                call.lost = True
            self._begin_anew()
            raise
        for gain in gains:
            for call in self._calls:
                if gain.row.key in call.keys:
                    call.gains.append((gain.row.key - call.keys.start, gain))
                    call.left -= gain.row.finish_reason is not None

    def _free_rows(self) -> None:
        """Give back the rows of texts that nobody waits for."""
        while self._given_up:
            call = self._given_up.popleft()
            if call in self._calls:
                self._calls.remove(call)
                for key in call.keys:
                    self._engine.cancel(key)

    def _begin_anew(self, columns: int | None = None) -> None:
        self._engine = Engine(self._target, self._drafter, self._max_rows, self._watches, columns=columns)
        self._calls: list[_Call] = []
