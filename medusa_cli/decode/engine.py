"""Continuous batching: texts join, are written side by side and leave, one step at a time.

The loop is the caller's: `add` what is wanted, call `step` until it is written. It knows no HTTP, no files and no text.
Shape letters: B rows, D places on a path, H hidden.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from medusa_cli.acceptance.choosing import GREEDY, Choosing, rule_of, shaped_first
from medusa_cli.acceptance.draws import Stream, uniform_of
from medusa_cli.contracts import Drafter, Step
from medusa_cli.decode.debug import Watch
from medusa_cli.decode.finite import NotFinite, error_of
from medusa_cli.decode.rows import Limits, Row, Rows
from medusa_cli.decode.step import take_step
from medusa_cli.drafters.none import NoDrafter
from medusa_cli.drafters.switched import SwitchedDrafter
from medusa_cli.errors import DataError
from medusa_cli.target.model import Target
from medusa_cli.target.prefill import OnRead


@dataclass(frozen=True)
class Request:
    """One text that is wanted.

    prompt      its ids
    limits      where it ends
    choosing    how its tokens are chosen; requests that hold the same object are decided together
    stream      its random numbers; a text's draws depend on nothing else
    speculate   False: this text gets no guesses, whatever the others get
    """

    prompt: Sequence[int]
    limits: Limits
    choosing: Choosing = GREEDY
    stream: Stream = field(default_factory=Stream)
    speculate: bool = True


@dataclass(frozen=True)
class Gain:
    """What one forward gave one row: its new ids, and the hidden states [len(tokens), H] that decided them."""

    row: Row
    tokens: Sequence[int]
    hidden_TH: Tensor


@dataclass(frozen=True)
class Stats:
    """Counts since the engine was made, and what it holds now.

    rows, waiting   texts being written, texts that wait for a row
    columns         cache columns that are committed, over all rows
    room            cache columns there is memory for, over all rows
    steps           forwards over trees
    drafted, kept   guesses verified, and guesses that became text
    """

    rows: int
    waiting: int
    columns: int
    room: int
    steps: int
    drafted: int
    kept: int


class Engine:
    """Writes the texts that were asked for, up to `max_rows` side by side."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        max_rows: int = 1,
        watches: Sequence[Watch] = (),
        on_read: OnRead | None = None,
    ) -> None:
        assert max_rows > 0
        self._on_read = on_read
        self._target = target
        self._drafter = SwitchedDrafter(drafter)
        self._max_rows = max_rows
        self._watches = watches
        self._waiting: deque[Row] = deque()
        self._rows: Rows | None = None
        self._next_key = 0
        self._steps = self._drafted = self._kept = 0

    @property
    def active(self) -> Sequence[Row]:
        """The texts being written."""
        return self._rows.active if self._rows is not None else ()

    @property
    def num_free(self) -> int:
        """Texts that would get a row at the next step."""
        return self._max_rows - len(self.active) - len(self._waiting)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to write."""
        return not self.active and not self._waiting

    def add(self, request: Request) -> int:
        """Ask for a text; the key that its gains carry. Raises as `check_prompt`, before anything is computed."""
        check_prompt(self._target, request.prompt, request.limits, "the prompt")
        key, self._next_key = self._next_key, self._next_key + 1
        prompt = list(request.prompt)
        self._waiting.append(
            Row(key, prompt, len(prompt), request.limits, request.choosing, request.stream, request.speculate)
        )
        return key

    def cancel(self, key: int) -> None:
        """Want a text no more: its row is free before the next step. A key that is not known changes nothing."""
        self._waiting = deque(row for row in self._waiting if row.key != key)
        for row in self.active:
            if row.key == key:
                row.finish_reason = "cancelled"
                self._retire()
                return

    def step(self) -> list[Gain]:
        """Read the prompts that found a row, or take one step with the texts being written: what each gained.

        A text whose row says `finish_reason` gains nothing more; its row is free already. One whose logits are not
        finite ends with `error`; the others go on.
        """
        free = self._max_rows - len(self.active)
        joining = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        if joining:
            return self._join(joining)
        return self._advance() if self.active else []

    def stats(self) -> Stats:
        """What it has done, and holds."""
        cache = self._rows.cache if self._rows is not None else None
        return Stats(
            rows=len(self.active),
            waiting=len(self._waiting),
            columns=sum(cache.lengths) if cache else 0,
            room=cache.num_rows * cache.layers[0].capacity if cache else 0,
            steps=self._steps,
            drafted=self._drafted,
            kept=self._kept,
        )

    def _join(self, joining: Sequence[Row]) -> list[Gain]:
        """Read the prompts that found a row. Alone where together their numbers are not finite: padding may be why."""
        rows = self._rows_for(joining)
        place = len(rows.active)
        try:
            gains = self._read(rows, joining)
        except NotFinite:
            for row in range(place, place + len(joining)):
                rows.cache.drop(row)
            rows.cache.wipe()
            gains = [gain for row in joining for gain in self._read_alone(rows, row)]
        self._retire()
        return gains

    def _read_alone(self, rows: Rows, row: Row) -> list[Gain]:
        try:
            return self._read(rows, [row])
        except NotFinite as found:
            rows.cache.drop(len(rows.active))
            rows.cache.wipe()
            return [self._failed(row, found)]

    @torch.inference_mode()
    def _read(self, rows: Rows, joining: Sequence[Row]) -> list[Gain]:
        """Read prompts together and decide each row's first token. Raises NotFinite; then no row has joined."""
        rows.lend_prefix(joining, self._target.tables.lendable)
        prompts = [row.tokens for row in joining]
        seen = self._target.prefill(prompts, rows.cache, first_row=len(rows.active), on_read=self._on_read)
        logits_BV = shaped_first(seen.logits_BNV[:, 0], [row.choosing.shaping for row in joining], joining)
        uniform = uniform_of([row.stream for row in joining], [0] * len(joining), logits_BV.device)
        rule = rule_of([row.choosing.rule for row in joining])
        rows.admit(joining, seen, rule.first(logits_BV, uniform))
        self._drafter.start(rows.context)
        return [Gain(row, row.new_tokens, seen.hidden_BNH[index]) for index, row in enumerate(joining)]

    def _advance(self) -> list[Gain]:
        """One step of all texts being written."""
        rows = self._rows
        assert rows is not None
        before = list(rows.active)
        try:
            step = self._step(rows)
        except NotFinite as found:
            rows.cache.wipe()
            (row,) = (row for row in before if row.key == found.row.key)
            gains = [self._failed(row, found)]
        else:
            for watch in self._watches:
                watch.after(rows, step)
            self._steps += 1
            self._drafted += (step.num_nodes - 1) * len(before)
            self._kept += sum(len(tokens) - 1 for tokens in step.tokens)
            gains = [
                Gain(row, tokens, hidden_DH[: len(tokens)])
                for row, tokens, hidden_DH in zip(before, step.tokens, step.hidden_BDH, strict=True)
            ]
        self._retire()
        return gains

    def _step(self, rows: Rows) -> Step:
        """One step. Where numbers are not finite it is taken again without guesses: one that plain decoding would never
        read may have spoilt what stood beside it. Raises NotFinite when that is no help.
        """
        try:
            return take_step(self._target, self._drafter, rows)
        except NotFinite:
            rows.cache.wipe()
        step = take_step(self._target, NoDrafter(), rows)
        self._drafter.start(rows.context)
        return step

    def _failed(self, row: Row, found: NotFinite) -> Gain:
        """The end of a text that can't be written on."""
        row.finish_reason, row.error = "error", error_of(self._target, found)
        return Gain(row, [], torch.empty(0, self._target.hidden_size))

    def _rows_for(self, joining: Sequence[Row]) -> Rows:
        """The rows, made when the first texts are known: there is room for what these may become."""
        if self._rows is None:
            columns = max(row.limits.columns_at_first(len(row.tokens)) for row in joining)
            self._rows = Rows(self._target.new_cache(self._max_rows, columns))
        return self._rows

    def _retire(self) -> None:
        """Take finished rows out, and tell the drafter when the rows it knew are no longer the same."""
        assert self._rows is not None
        if self._rows.retire() and self._rows.active:
            self._drafter.start(self._rows.context)


def check_prompt(target: Target, prompt: Sequence[int], limits: Limits, name: str) -> None:
    """Raise DataError, calling it `name`, for a prompt that is empty or leaves no room in the context.

    Raises TargetError for one with a token that the target has no embedding for.
    """
    if not prompt:
        raise DataError(f"{name} is empty", "give at least one token; a base model needs some text to go on")
    if limits.budget(len(prompt)) < 1:
        raise DataError(
            f"{name} has {len(prompt)} tokens; the model's context holds {limits.context_limit}",
            "shorten the prompt: at least one position must be left to write to",
        )
    target.check_ids([prompt])
