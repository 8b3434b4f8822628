"""Continuous batching: texts join, are written side by side and leave, one step at a time.

The loop is the caller's: `add` what is wanted, call `step` until it is written. It knows no HTTP, no files and no text.
Shape letters: B rows, D places on a path, H hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from medusa_cli.acceptance.random_streams import Stream, uniform_of
from medusa_cli.acceptance.sampling import GREEDY, Choosing, rule_of, shaped_first
from medusa_cli.contracts import Drafter, Seen, Step
from medusa_cli.decode.admission import Queue, Room, check_prompt
from medusa_cli.decode.debug import Watch
from medusa_cli.decode.drafted import Drafted
from medusa_cli.decode.finite import NotFinite, error_of
from medusa_cli.decode.memory import columns_for
from medusa_cli.decode.prefixes import Prefixes
from medusa_cli.decode.rows import Limits, Row, Rows
from medusa_cli.decode.step import take_step
from medusa_cli.drafters.switched import SilentDrafter, SwitchedDrafter
from medusa_cli.model.prefill import OnRead, Progress, pieces
from medusa_cli.model.target import Target


@dataclass(frozen=True)
class Request:
    """One text that is wanted.

    prompt      its ids
    limits      where it ends
    choosing    how its tokens are chosen; requests that hold the same object are decided together
    stream      its random numbers; a text's draws depend on nothing else
    speculate   False: this text gets no guesses, whatever the others get
    owner       whose text it is: what was read for one is never lent to another
    """

    prompt: Sequence[int]
    limits: Limits
    choosing: Choosing = GREEDY
    stream: Stream = field(default_factory=Stream)
    speculate: bool = True
    owner: str = ""


@dataclass(frozen=True)
class Gain:
    """What one forward gave one row: its new ids, and the hidden states [len(tokens), H] that decided them.

    drafted   what was guessed; None where a prompt was read
    """

    row: Row
    tokens: Sequence[int]
    hidden_TH: Tensor
    drafted: Drafted | None = None


@dataclass(frozen=True)
class Stats:
    """Counts since the engine was made, and what it holds now.

    rows            texts being written
    reading         texts whose prompts are being read
    waiting         texts that wait for a row
    columns         cache columns that are committed, over all rows
    held            cache columns that are set aside for the texts in rows, for what these may become
    free            cache columns that are left for others; None where nobody set a bound
    steps           forwards over trees
    drafted, kept   guesses verified, and guesses that became text
    """

    rows: int
    reading: int
    waiting: int
    columns: int
    held: int
    free: int | None
    steps: int
    drafted: int
    kept: int


class Engine:
    """Writes the texts that were asked for, up to `max_rows` side by side.

    columns    of the cache that there is memory for, over all rows; None: any number. Texts that can't fit now wait
    prefixes   what was read of prompts before, by this engine or others
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        max_rows: int = 1,
        watches: Sequence[Watch] = (),
        on_read: OnRead | None = None,
        columns: int | None = None,
        prefixes: Prefixes | None = None,
    ) -> None:
        assert max_rows > 0
        self._prefixes = prefixes
        self._on_read = on_read
        self._target = target
        target.stock.layer_inputs.check(drafter.taps)
        self._drafter = SwitchedDrafter(drafter)
        self._room = Room(max_rows, lambda text: columns_for(target, text, drafter.size), columns)
        self._watches = watches
        self._queue = Queue(self._room)
        self._reading: list[Row] = []  # their rows of the cache lie behind those of the active ones, in this order
        self._has_read = False
        self._progress = Progress(None, 0)
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
        return self._room.max_rows - len(self.active) - len(self._reading) - len(self._queue.rows)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to write."""
        return not self.active and not self._reading and not self._queue.rows

    def check(self, request: Request, name: str = "the prompt") -> Row:
        """The row of a text that can be written. Raises as `check_prompt`, and DataError where memory never holds it.

        name   what messages call its prompt
        """
        check_prompt(self._target, request.prompt, request.limits, name)
        chosen = request.limits, request.choosing, request.stream, request.speculate, request.owner
        row = Row(self._next_key, list(request.prompt), len(request.prompt), *chosen)
        self._queue.check(row, name)
        return row

    def add(self, request: Request) -> int:
        """Ask for a text; the key that its gains carry. Raises as `check`, before anything is computed."""
        row = self.check(request)
        self._queue.rows.append(row)
        self._next_key += 1
        return row.key

    def cancel(self, key: int) -> None:
        """Want a text no more: its row is free before the next step. A key that is not known changes nothing."""
        self._queue.remove(key)
        for row in (*self.active, *self._reading):
            if row.key == key:
                row.finish_reason = "cancelled"
                if row in self._reading:
                    self._stop_reading(row)
                self._retire()

    def step(self) -> list[Gain]:
        """Read a piece of the prompts that found a row, or take one step with the texts being written.

        Both in turn, where there is both to do: a long prompt holds nobody up. Returns what each text gained. A text
        whose row says `finish_reason` gains nothing more; its row is free already. One whose logits are not finite
        ends with `error`; the others go on.
        """
        if not self._reading and (joining := self._queue.take(self.active)):
            self._begin(joining)
        reads = bool(self._reading) and not (self._has_read and self.active)
        self._has_read = reads
        gains = self._read() if reads else self._advance() if self.active else []
        self._retire()
        return gains

    def stats(self) -> Stats:
        """What it has done, and holds."""
        held = self._room.taken_by([*self.active, *self._reading])
        return Stats(
            rows=len(self.active),
            reading=len(self._reading),
            waiting=len(self._queue.rows),
            columns=sum(self._rows.cache.lengths) if self._rows else 0,
            held=held,
            free=None if self._room.columns is None else self._room.columns - held,
            steps=self._steps,
            drafted=self._drafted,
            kept=self._kept,
        )

    def _begin(self, joining: Sequence[Row]) -> None:
        """Give waiting texts rows behind the active ones; nothing is read yet."""
        rows = self._rows_for(joining)
        rows.lend_prefix(joining, self._target.tables.lendable)
        for place, row in enumerate(joining, start=len(rows.active)):
            if self._prefixes is not None:
                self._prefixes.lend(rows.cache, place, row)
            row.lent = rows.cache.lengths[place]
        self._reading = list(joining)
        self._progress = Progress(self._on_read, sum(len(row.tokens) - held for row, held in self._held()))

    def _read(self) -> list[Gain]:
        """Read one piece of the prompts that are being read; the first tokens of those that are read whole."""
        rows = self._rows
        assert rows is not None
        prompts, held = [row.tokens for row in self._reading], [held for _, held in self._held()]
        piece = next(pieces(prompts, held, self._target.forward_memory))
        seen = self._target.read_piece(piece, rows.cache, len(rows.active), self._drafter.taps)
        self._progress.add(piece.num_tokens)
        if not piece.is_last:
            return []
        whole = self._reading[: len(piece.ids)]
        try:
            return self._admit(whole, seen)
        except NotFinite:
            return self._read_alone(whole)

    @torch.inference_mode()
    def _admit(self, whole: Sequence[Row], seen: Seen) -> list[Gain]:
        """Decide the first token of prompts that are read. Raises NotFinite; then no row has joined."""
        rows = self._rows
        assert rows is not None
        logits_BV = shaped_first(seen.logits_BNV[:, 0], [row.choosing.shaping for row in whole], whole)
        uniform = uniform_of([row.stream for row in whole], [0] * len(whole), logits_BV.device)
        rows.admit(whole, seen, rule_of([row.choosing.rule for row in whole]).first(logits_BV, uniform))
        del self._reading[: len(whole)]
        joined = slice(len(rows.active) - len(whole), len(rows.active))
        prompts = [row.tokens[: row.prompt_tokens] for row in whole]
        self._drafter.join(joined.start, prompts, rows.cache.read_taps(joined))
        if self._prefixes is not None:
            for place, row in enumerate(whole, start=joined.start):
                self._prefixes.keep(rows.cache, place, row)
        return [Gain(row, row.new_tokens, seen.hidden_BNH[index]) for index, row in enumerate(whole)]

    def _read_alone(self, whole: Sequence[Row]) -> list[Gain]:
        """Read prompts again, each by itself: where numbers are not finite, the padding beside others may be why."""
        rows = self._rows
        assert rows is not None
        first = len(rows.active)
        for place, row in enumerate(whole, start=first):
            rows.cache.drop(place)
            if self._prefixes is not None:
                self._prefixes.forget(row)
        rows.cache.wipe()
        gains = []
        for row in whole:
            try:
                first, taps = len(rows.active), self._drafter.taps
                gains += self._admit([row], self._target.prefill([row.tokens], rows.cache, first, taps=taps))
            except NotFinite as found:
                gains.append(self._failed(row, found))
                self._stop_reading(row)
                rows.cache.wipe()
        return gains

    def _held(self) -> list[tuple[Row, int]]:
        """The rows that are being read, with the tokens that each holds."""
        assert self._rows is not None
        first = len(self._rows.active)
        return list(zip(self._reading, self._rows.cache.lengths[first : first + len(self._reading)], strict=True))

    def _stop_reading(self, row: Row) -> None:
        """Give up the row of a text that is not read yet; those behind it move up."""
        assert self._rows is not None
        place = len(self._rows.active) + self._reading.index(row)
        self._reading.remove(row)
        self._rows.cache.close_gap(place, 1, len(self._rows.active) + len(self._reading))

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
            gains = [_gain(row, step, place) for place, row in enumerate(before)]
        return gains

    def _step(self, rows: Rows) -> Step:
        """One step. Where numbers are not finite it is taken again without guesses: one that plain decoding would never
        read may have spoilt what stood beside it. Raises NotFinite when that is no help.
        """
        try:
            return take_step(self._target, self._drafter, rows)
        except NotFinite:
            rows.cache.wipe()
        return take_step(self._target, SilentDrafter(self._drafter), rows)

    def _failed(self, row: Row, found: NotFinite) -> Gain:
        """The end of a text that can't be written on."""
        row.finish_reason, row.error = "error", error_of(self._target, found)
        return Gain(row, [], torch.empty(0, self._target.hidden_size))

    def _rows_for(self, joining: Sequence[Row]) -> Rows:
        """The rows, made when the first texts are known: there is room for what these may become."""
        if self._rows is None:
            columns = max(row.limits.columns_at_first(len(row.tokens)) for row in joining)
            self._rows = Rows(self._target.new_cache(self._room.num_rows(joining), columns))
        self._room.make_in(self._rows.cache, [*self.active, *joining])
        return self._rows

    def _retire(self) -> None:
        """Take finished rows out, of the drafter's memory too; what they hold may begin other prompts."""
        if self._rows is not None and self._prefixes is not None:
            for place, row in enumerate(self._rows.active):
                if row.finish_reason is not None and row.error is None:
                    self._prefixes.keep(self._rows.cache, place, row)
        if self._rows is not None and (finished := self._rows.retire(self._drafter)):
            self._rows.cache.close_gap(len(self.active), len(finished), len(self.active) + len(self._reading))


def _gain(row: Row, step: Step, place: int) -> Gain:
    """What a step gave the row at this place."""
    tokens = step.tokens[place]
    drafted = Drafted(step.draft, place, step.paths[place][: len(tokens)])
    return Gain(row, tokens, step.hidden_BDH[place, : len(tokens)], drafted)
