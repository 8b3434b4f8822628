"""The loops over an engine that most callers want: many prompts of one kind, as they come or as whole texts."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from medusa_cli.acceptance.logits_processors import Shaping
from medusa_cli.acceptance.random_streams import Stream
from medusa_cli.acceptance.sampling import Choosing
from medusa_cli.contracts import AcceptanceRule, Drafter
from medusa_cli.decode.debug import watching
from medusa_cli.decode.engine import Engine, Gain, Request
from medusa_cli.decode.rows import Limits, Row
from medusa_cli.model.prefill import OnRead
from medusa_cli.model.target import Target


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
    choosing = Choosing(parts.rule, parts.shaping)
    waiting = enumerate(prompts)
    with watching(parts.target) as watches:
        engine = Engine(parts.target, parts.drafter, max_rows, watches, parts.on_read)
        while True:
            free = engine.num_free
            for key, prompt in islice(waiting, free if free >= join_at or engine.idle else 0):
                engine.add(Request(prompt, limits, choosing, Stream(parts.seed, parts.number_of(key))))
            if engine.idle:
                return
            for gain in engine.step():
                if gain.row.error is not None:
                    raise gain.row.error
                yield gain


def collect(parts: Parts, prompts: Sequence[Sequence[int]], limits: Limits, max_rows: int = 1) -> list[Generation]:
    """Every prompt's finished text, in the prompts' order."""
    finished: dict[int, Row] = {}
    for gain in decode(parts, prompts, limits, max_rows):
        finished[gain.row.key] = gain.row
    return [generation_of(finished[key]) for key in range(len(prompts))]


def generation_of(row: Row) -> Generation:
    """What a finished row has to tell."""
    assert row.finish_reason in ("stop", "length")
    return Generation(row.new_tokens, row.finish_reason, row.kept, row.num_nodes)
