"""The loop around take_step: rows join as others leave, and every gain is reported as it comes.

Shape letters: B rows, D places on a path, H hidden.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Literal

import torch
from torch import Tensor

from medusa_cli.acceptance.draws import Stream, uniform_of
from medusa_cli.acceptance.shaping import Shaping
from medusa_cli.contracts import AcceptanceRule, Drafter, Step
from medusa_cli.decode.debug import Watch, watching
from medusa_cli.decode.finite import NotFinite, error_of
from medusa_cli.decode.rows import Limits, Row, Rows
from medusa_cli.decode.step import take_step
from medusa_cli.drafters.none import NoDrafter
from medusa_cli.errors import DataError
from medusa_cli.target.cache import BLOCK
from medusa_cli.target.model import Target
from medusa_cli.target.prefill import OnRead

AHEAD = 512  # tokens of a text that there is room for from the start: many texts end before their budget does


@dataclass(frozen=True)
class Parts:
    """What decoding is made of; `shaping` reworks logits before the rule sees them.

    The text of prompt `key` is drawn with a stream of its own, which `seed` and `number_of(key)` give. `on_read` is
    told how far reading is whenever a piece of the joining prompts has been read.
    """

    target: Target
    drafter: Drafter
    rule: AcceptanceRule
    shaping: Shaping | None = None
    seed: int = 0
    number_of: Callable[[int], int] = int
    on_read: OnRead | None = None


@dataclass(frozen=True)
class Gain:
    """What one forward gave one row: its new ids, and the hidden states [len(tokens), H] that decided them."""

    row: Row
    tokens: Sequence[int]
    hidden_TH: Tensor


@dataclass(frozen=True)
class Generation:
    """A finished text: `kept` has the tokens gained at each step (the prefill's first token is extra)."""

    token_ids: list[int]
    finish_reason: Literal["stop", "length"]
    kept: list[int]
    num_nodes: list[int]

    @property
    def num_steps(self) -> int:
        """Forwards after the prefill."""
        return len(self.kept)


def decode(
    parts: Parts, prompts: Iterable[Sequence[int]], limits: Limits, max_rows: int = 1, join_at: int = 1
) -> Iterator[Gain]:
    """Write a text after every prompt, up to `max_rows` side by side; `gain.row.key` is the prompt's index.

    New rows join when at least `join_at` are free: prompts are read better together. A row whose `finish_reason` is
    set gains nothing more. Raises DataError before the forward for a prompt that is empty or leaves no room in the
    context, and TargetError when the logits that decide a token are not finite.
    """
    with watching(parts.target) as watches:
        yield from _decode(parts, prompts, limits, max_rows, join_at, watches)


def _decode(
    parts: Parts,
    prompts: Iterable[Sequence[int]],
    limits: Limits,
    max_rows: int,
    join_at: int,
    watches: Sequence[Watch],
) -> Iterator[Gain]:
    numbered = enumerate(prompts)
    first = list(islice(numbered, max_rows))
    waiting = chain(first, numbered)
    columns = columns_at_first([prompt for _, prompt in first], limits)
    rows = Rows(parts.target.new_cache(max_rows, columns), parts.shaping)
    while True:
        free = max_rows - len(rows.active)
        joining = list(islice(waiting, free)) if free >= join_at or not rows.active else []
        if joining:
            yield from _join(parts, rows, [_new_row(parts, key, prompt, limits) for key, prompt in joining])
        if rows.active:
            before = list(rows.active)
            step = _step(parts, rows)
            for watch in watches:
                watch.after(rows, step)
            for index, row in enumerate(before):
                yield Gain(row, step.tokens[index], step.hidden_BDH[index, : len(step.tokens[index])])
            _retire(parts, rows)
        elif not joining:
            return


def columns_at_first(prompts: Sequence[Sequence[int]], limits: Limits) -> int:
    """Columns that these texts will need, or so many that growing by blocks from there on is a small matter."""
    needed = (len(prompt) + min(max(0, limits.budget(len(prompt))), AHEAD) for prompt in prompts)
    return -(-max(needed, default=0) // BLOCK) * BLOCK


def collect(parts: Parts, prompts: Sequence[Sequence[int]], limits: Limits, max_rows: int = 1) -> list[Generation]:
    """Every prompt's finished text, in the prompts' order."""
    finished: dict[int, Row] = {}
    for gain in decode(parts, prompts, limits, max_rows):
        finished[gain.row.key] = gain.row
    return [generation_of(finished[key]) for key in range(len(prompts))]


def generation_of(row: Row) -> Generation:
    """What a finished row has to tell."""
    assert row.finish_reason is not None
    return Generation(row.new_tokens, row.finish_reason, row.kept, row.num_nodes)


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


def _new_row(parts: Parts, key: int, prompt: Sequence[int], limits: Limits) -> Row:
    check_prompt(parts.target, prompt, limits, "the prompt")
    return Row(key, list(prompt), len(prompt), limits, Stream(parts.seed, parts.number_of(key)))


@torch.inference_mode()
def _prefill(parts: Parts, rows: Rows, joining: Sequence[Row]) -> Tensor:
    """Read the joining prompts with one forward and decide each row's first token; hidden states [B, 1, H]."""
    rows.lend_prefix(joining, parts.target.tables.lendable)
    prompts = [row.tokens for row in joining]
    seen = parts.target.prefill(prompts, rows.cache, first_row=len(rows.active), on_read=parts.on_read)
    logits_BV = seen.logits_BNV[:, 0]
    if parts.shaping is not None:
        logits_BV = parts.shaping.first(logits_BV, joining)
    uniform = uniform_of([row.stream for row in joining], [0] * len(joining), logits_BV.device)
    rows.admit(joining, seen, parts.rule.first(logits_BV, uniform))
    parts.drafter.start(rows.context)
    return seen.hidden_BNH


def _step(parts: Parts, rows: Rows) -> Step:
    """One step. Where numbers are not finite it is taken again without guesses: one that plain decoding would never
    read may have spoilt what stood beside it. Raises TargetError when that is no help.
    """
    try:
        return take_step(parts.target, parts.drafter, parts.rule, rows)
    except NotFinite:
        rows.cache.wipe()
    try:
        step = take_step(parts.target, NoDrafter(), parts.rule, rows)
    except NotFinite as found:
        raise error_of(parts.target, found) from found
    parts.drafter.start(rows.context)
    return step


def _read(parts: Parts, rows: Rows, joining: Sequence[Row]) -> Tensor:
    """As `_prefill`; each prompt alone where together their numbers are not finite, since padding may be why."""
    place = len(rows.active)
    try:
        return _prefill(parts, rows, joining)
    except NotFinite:
        for row in range(place, place + len(joining)):
            rows.cache.drop(row)
        rows.cache.wipe()
    try:
        return torch.cat([_prefill(parts, rows, [row]) for row in joining])
    except NotFinite as found:
        raise error_of(parts.target, found) from found


def _join(parts: Parts, rows: Rows, joining: Sequence[Row]) -> Iterator[Gain]:
    """Prefill, then report every joining row's first token."""
    hidden_B1H = _read(parts, rows, joining)
    for index, row in enumerate(joining):
        yield Gain(row, row.new_tokens, hidden_B1H[index])
    _retire(parts, rows)


def _retire(parts: Parts, rows: Rows) -> None:
    """Take finished rows out, and tell the drafter when the rows it knew are no longer the same."""
    if rows.retire() and rows.active:
        parts.drafter.start(rows.context)
