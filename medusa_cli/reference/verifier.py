"""Parallel verifier: the model's probabilities behind the text and behind every guess, asked side by side.

A served model answers many prefixes at once in about the time of one; that is where the speed comes from. A real engine
asks all nodes in one forward, with a mask in place of the threads (docs/architecture.md).
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as TooLate  # of its own kind before Python 3.11

from medusa_cli.reference.candidates import Model, checked
from medusa_cli.reference.trie import Trie


class Verifier:
    """Asks the model on so many threads.

    timeout   seconds that a whole step may take; None: any. Python can't stop a thread: a call that hangs goes on, and
              Python waits for it at its end
    """

    def __init__(self, model: Model, workers: int = 16, timeout: float | None = None) -> None:
        self._model, self._timeout = model, timeout
        self._pool = ThreadPoolExecutor(workers)

    def close(self) -> None:
        """Drop what has not begun; see contextlib.closing."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def __call__(self, text: Sequence[Hashable], trie: Trie) -> list[Mapping[Hashable, float]]:
        """Probabilities of what comes after each node, by node. Raises what the model raises, and TimeoutError."""
        prefixes = ([*text, *trie.path(node)] for node in range(trie.num_guesses + 1))
        asked = [self._pool.submit(self._model, prefix) for prefix in prefixes]
        ends = None if self._timeout is None else time.monotonic() + self._timeout
        try:
            return [self._answer(future, ends) for future in asked]
        finally:  # nobody waits for the rest of a step that broke off
            for future in asked:
                future.cancel()

    def _answer(self, future: Future[Mapping[Hashable, float]], ends: float | None) -> Mapping[Hashable, float]:
        try:
            return checked(future.result(None if ends is None else max(0.0, ends - time.monotonic())))
        except TooLate as late:
            if future.done():
                raise  # the model's own
            raise TimeoutError(f"the model took longer than {self._timeout:g} s for a step") from late
