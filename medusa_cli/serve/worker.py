"""The engine on a thread of its own: requests come from any thread, and what texts gain goes back to who asked.

Whose turn it is goes round the clients, so that one who asks for much delays others by one text at a time. Texts never
depend on what is written beside them.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from medusa_cli.contracts import Drafter
from medusa_cli.decode.drafted import Verified
from medusa_cli.decode.engine import Engine, Gain, Request, Stats
from medusa_cli.decode.memory import free_columns
from medusa_cli.decode.prefixes import Prefixes
from medusa_cli.decode.rows import Limits
from medusa_cli.errors import MedusaError
from medusa_cli.model.target import Target

logger = logging.getLogger(__name__)


class Busy(Exception):
    """As many texts wait as may."""


class Closed(Exception):
    """The server is about to end and takes nothing new."""


@dataclass(frozen=True)
class Logprob:
    """A token that was chosen: its logarithmic probability by the target, and those of the likeliest there."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class News:
    """What happened to one text.

    index           of the text among those that were asked for together
    tokens          new ids
    finish_reason   "stop" or "length" where the text has ended
    error           why it can't be written on, in words
    steps, drafted, accepted   forwards of the text so far, guesses verified in them, and guesses that became text
    lent            tokens of the prompt that were not read, as a prompt before began with them
    tree            what was guessed in this step, where that is asked for
    queued_s        that it waited for a row
    """

    index: int
    tokens: list[int]
    finish_reason: str | None = None
    error: str | None = None
    logprobs: list[Logprob] | None = None
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    lent: int = 0
    tree: Verified | None = None
    queued_s: float = 0.0


@dataclass(eq=False)
class Asked:
    """Texts that one client wants.

    deliver        told the news of them, on the engine's thread: it must not block
    num_logprobs   likeliest tokens that are told at each place; None: no logprobs
    with_trees     whether the guesses of each step are told
    """

    client: str
    requests: Sequence[Request]
    deliver: Callable[[News], None]
    num_logprobs: int | None = None
    with_trees: bool = False
    is_cancelled: bool = False
    keys: dict[int, int] = field(default_factory=dict)  # the engine's key -> index
    queued_s: dict[int, float] = field(default_factory=dict)  # by index
    left: int = 0
    since: float = field(default_factory=time.monotonic)


@dataclass
class Counts:
    """What was done since the start. accepted_at: guesses that became text, by their place in the step."""

    steps: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0

    def step_of(self, drafted: int, accepted: int) -> None:
        """A step of one text."""
        self.drafts += drafted > 0
        self.drafted += drafted
        self.accepted += accepted
        self.accepted_at += [0] * (accepted - len(self.accepted_at))
        for place in range(accepted):
            self.accepted_at[place] += 1


class Worker:
    """Writes up to `max_rows` texts side by side; at most `max_waiting` others wait."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        max_rows: int,
        max_waiting: int,
        longest: int,
        prefixes: Prefixes | None = None,
    ) -> None:
        """longest: tokens of a prompt and its text, for which forwards must have room beside the cache."""
        self._target, self._drafter, self.prefixes = target, drafter, prefixes
        self._max_rows, self._max_waiting = max_rows, max_waiting
        pool_bytes = prefixes.pool.memory.most_bytes if prefixes else 0
        self._columns = free_columns(target, [range(longest)], Limits(1), max_rows, drafter, reserved=pool_bytes)
        self._engine, self._steps_before = self._new_engine(), 0
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, deque[tuple[Asked, int]]] = OrderedDict()
        self._num_waiting = 0
        self._cancelled: deque[Asked] = deque()
        self._owners: dict[int, Asked] = {}
        self._closing = self._closed = False
        self.counts = Counts()
        self._thread = threading.Thread(target=self._run, name="medusa-engine", daemon=True)

    @property
    def drafter(self) -> str:
        """Who guesses."""
        return self._drafter.name

    @property
    def most_texts(self) -> int:
        """As many as one client may ask for at once, however idle the server is."""
        return self._max_rows + self._max_waiting

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def submit(self, asked: Asked) -> None:
        """Ask for texts, all of them or none. Raises Busy, Closed, and DataError for one that can't be written."""
        for number, request in enumerate(asked.requests, start=1):
            self._engine.check(request, f"prompt {number}" if len(asked.requests) > 1 else "the prompt")
        with self._changed:
            if self._closing:
                raise Closed
            if self._num_waiting + len(asked.requests) > self._max_waiting + max(0, self._engine.num_free):
                raise Busy
            asked.left = len(asked.requests)
            waiting = self._waiting.setdefault(asked.client, deque())
            waiting.extend((asked, index) for index in range(len(asked.requests)))
            self._num_waiting += len(asked.requests)
            self._changed.notify()

    def prefetch(self, asked: Asked) -> "Future[None] | None":
        """Ask the pool's store for what these prompts begin with; None where there is nothing to wait for."""
        if self.prefixes is None or not self.prefixes.pool.has_store:
            return None
        # the prompts of one request are few ways to go on: what they share is the beginning of the longest
        longest = max(asked.requests, key=lambda request: len(request.prompt))
        ids = longest.prompt
        return self.prefixes.pool.prefetch(self.prefixes.keys(ids[:-1], len(ids), longest.owner))

    def cancel(self, asked: Asked) -> None:
        """Nobody waits for these texts any more: their rows are free before the next step."""
        with self._changed:
            if asked.left and not asked.is_cancelled:
                asked.is_cancelled = True
                self._cancelled.append(asked)
                self._changed.notify()

    def close(self, patience_s: float) -> None:
        """Take nothing new, finish what is being written for so long, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.wait_for(lambda: not self._owners and not self._num_waiting, patience_s)
            self._closed = True
            self._changed.notify()
        self._thread.join(patience_s)
        if self.prefixes is not None:
            self.prefixes.pool.close()

    @property
    def is_alive(self) -> bool:
        """Whether texts are being written, or could be."""
        return self._thread.is_alive() and not self._closing

    def stats(self) -> Stats:
        """Rows, columns and texts that wait now."""
        return self._engine.stats()

    @property
    def num_waiting(self) -> int:
        """Texts that have no row yet."""
        return self._num_waiting

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                if self._closed:
                    return
                self._drop_cancelled()
                self._let_in()
            try:
                self._step()
            # whatever it was, the cache may be half written: nothing that is in it goes on
            except Exception:
                logger.exception("a step broke off")
                self._fail_all()
            with self._changed:
                self._changed.notify_all()

    def _step(self) -> None:
        """One step, and its news."""
        gains = self._engine.step()
        self.counts.steps = self._steps_before + self._engine.stats().steps
        for gain in gains:
            self._hand_out(gain)

    def _has_work(self) -> bool:
        return bool(self._closed or self._num_waiting or self._cancelled or not self._engine.idle)

    def _drop_cancelled(self) -> None:
        while self._cancelled:
            asked = self._cancelled.popleft()
            for key in asked.keys:
                self._engine.cancel(key)
                self._owners.pop(key, None)
            for client, waiting in list(self._waiting.items()):
                kept = deque(each for each in waiting if each[0] is not asked)
                self._num_waiting -= len(waiting) - len(kept)
                self._waiting[client] = kept
            asked.left = 0

    def _let_in(self) -> None:
        """Give free rows to those who wait, one client after the other."""
        while self._num_waiting and self._engine.num_free > 0:
            client, waiting = next(iter(self._waiting.items()))
            self._waiting.move_to_end(client)
            if not waiting:
                del self._waiting[client]
                continue
            asked, index = waiting.popleft()
            self._num_waiting -= 1
            try:
                key = self._engine.add(asked.requests[index])
            except MedusaError as error:
                self._tell(asked, News(index, [], error=error.message))
                continue
            asked.keys[key] = index
            asked.queued_s[index] = time.monotonic() - asked.since
            self._owners[key] = asked
            self.counts.prompt_tokens += len(asked.requests[index].prompt)

    def _hand_out(self, gain: Gain) -> None:
        row = gain.row
        asked = self._owners.get(row.key)
        if asked is None:
            return
        if row.kept and gain.tokens:
            self.counts.step_of(row.num_nodes[-1] - 1, row.kept[-1] - 1)
        self.counts.tokens += len(gain.tokens)
        if row.finish_reason is not None:
            del self._owners[row.key]
        error = row.error.message if row.error is not None else None
        accepted, drafted = sum(row.kept) - len(row.kept), sum(row.num_nodes) - len(row.num_nodes)
        reason = None if error else row.finish_reason
        told = self._logprobs(asked, gain) if gain.tokens else None
        counts = len(row.kept), drafted, accepted, row.lent
        tree = gain.drafted.verified() if asked.with_trees and gain.drafted is not None else None
        index = asked.keys[row.key]
        waited = asked.queued_s[index]
        self._tell(asked, News(index, list(gain.tokens), reason, error, told, *counts, tree, waited))

    @torch.inference_mode()
    def _logprobs(self, asked: Asked, gain: Gain) -> list[Logprob] | None:
        """Of the target as it is, whatever sampling makes of it."""
        if asked.num_logprobs is None:
            return None
        logits_DV = self._target.logits_of(gain.hidden_TH.to(self._target.device)).float()
        logp_DV = logits_DV[:, : self._target.real_vocab].log_softmax(-1)
        chosen_D = logp_DV.gather(1, torch.tensor(gain.tokens, device=logp_DV.device)[:, None])[:, 0].tolist()
        best_DK, ids_DK = (each.tolist() for each in logp_DV.topk(asked.num_logprobs))
        return [
            Logprob(token, logprob, list(zip(ids, best, strict=True)))
            for token, logprob, ids, best in zip(gain.tokens, chosen_D, ids_DK, best_DK, strict=True)
        ]

    def _tell(self, asked: Asked, news: News) -> None:
        if news.finish_reason or news.error:
            asked.left -= 1
        try:
            asked.deliver(news)
        except RuntimeError:  # the loop of who asked has ended
            self.cancel(asked)

    def _fail_all(self) -> None:
        """Tell everybody who has a row that the text is lost, and begin anew."""
        with self._changed:
            lost = [(asked, asked.keys[key]) for key, asked in self._owners.items()]
            self._owners.clear()
            self._steps_before = self.counts.steps
            self._engine = self._new_engine()
        for asked, index in lost:
            self._tell(asked, News(index, [], error="the text is lost: a step that it shared with others broke off"))

    def _new_engine(self) -> Engine:
        return Engine(self._target, self._drafter, self._max_rows, columns=self._columns, prefixes=self.prefixes)
