"""The nouns that travel between the rooms, and the protocols of the swappable parts.

Shape letters: B rows, N tree nodes with the root, D places on a path (max depth + 1), K heads, V vocabulary,
H hidden, L tapped layers, T positions. This file knows no drafter, no rule and no model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from medusa_cli.trees.tree import TokenTree


@dataclass(frozen=True)
class Draft:
    """Tokens poured into a tree. tokens_BN[:, 0] are the roots, which are already decided.

    q_BNV is the distribution each node's token was drawn from, or None when each guess is certain.
    """

    tokens_BN: Tensor
    tree: TokenTree
    q_BNV: Tensor | None = None

    def of_rows(self, members: Sequence[int]) -> "Draft":
        """What is drafted for these rows."""
        rows = list(members)
        q_BNV = None if self.q_BNV is None else self.q_BNV[rows]
        return Draft(self.tokens_BN[rows], self.tree.of_rows(rows), q_BNV)


@dataclass(frozen=True)
class Seen:
    """What one forward of the target shows: hidden_BNH (final, normed) and logits_BNV, one per token asked for.

    It holds until the next forward, which may write to the same memory: who keeps some of it longer copies that.

    taps_BNLH   states of inner layers at every token, asked for or not; None where nobody wants any
    """

    hidden_BNH: Tensor
    logits_BNV: Tensor
    taps_BNLH: Tensor | None = None


@dataclass(frozen=True)
class Verdict:
    """Which path survives in each row, and what follows it.

    path_BD  node indices from the root down, -1 past the end
    kept_B   how many nodes of the path are kept, the root included; 0 for a finished row
    next_B   the token decided after the kept path: the next root
    paths    path_BD on the host, and
    kept     kept_B on the host: both known once `rows.limit` has made its one read
    """

    path_BD: Tensor
    kept_B: Tensor
    next_B: Tensor
    paths: Sequence[Sequence[int]] | None = None
    kept: Sequence[int] | None = None


@dataclass(frozen=True)
class Context:
    """All a drafter may see.

    tokens               every row's token ids so far, prompt and root included (host lists: read, don't keep)
    root_B               the token already decided and not yet in the cache
    hidden_BH            the target's hidden state that decided the root
    accepted_hidden_BDH  hidden states along the path the last step kept; garbage at and past kept_B
    speculate            which rows want guesses; None: all
    """

    tokens: Sequence[Sequence[int]]
    root_B: Tensor
    hidden_BH: Tensor
    accepted_hidden_BDH: Tensor | None = None
    speculate: Sequence[bool] | None = None


@dataclass(frozen=True)
class Step:
    """What one step decided: per row its new token ids (guesses kept, then the bonus token), and its size.

    tokens            new ids per row, already cut at stops and budgets; empty for a row that was finished before
    num_nodes         nodes verified per row, the root included
    draft, paths      what was verified, and each row's path in it on the host, -1 past the end
    hidden_BDH        the hidden states along each kept path, the ones that decided `tokens`, in order
    taps_BDLH         states of inner layers along each kept path, where the drafter wants some
    """

    tokens: Sequence[Sequence[int]]
    num_nodes: int
    draft: Draft
    paths: Sequence[Sequence[int]]
    hidden_BDH: Tensor
    taps_BDLH: Tensor | None = None


Uniform = Callable[[int], Tensor]
"""(places) -> numbers in [0, 1) [rows, places] that decide the next tokens of each row's text"""


class Memory(Protocol):
    """What is told of the rows, exactly as it happens to the target's cache; `drafters.memory` has the empty rest.

    taps   the layers whose states it wants, numbered as transformers' `hidden_states`: i is what goes into layer i, 0
           the embeddings, and the number of layers what the output matrix sees. () for none; then all taps are None

    Row b has states for all of its tokens but the root, which is read with the next step. What is handed over holds
    until the call returns. One engine at a time.
    """

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers, in the order of what is handed over."""

    def join(self, first_row: int, prompts: Sequence[Sequence[int]], taps_BTLH: Tensor | None) -> None:
        """Rows from `first_row` on begin with these tokens read, whatever stood there; past each one's end: padding."""

    def keep(self, context: Context, taps_BDLH: Tensor | None) -> None:
        """A step has ended: of each row as many states as it has tokens more than before; padding behind them."""

    def move(self, source: int, row: int) -> None:
        """A row takes another place, whatever stood there."""

    def drop(self, row: int) -> None:
        """A row has gone."""


class Drafter(Memory, Protocol):
    """Guesses a tree under each row's root; `size` is the most nodes it offers in a step, the root left out."""

    @property
    def name(self) -> str:
        """What the command line and reports call it."""

    @property
    def size(self) -> int:
        """Nodes under the root, at most."""

    def propose(self, context: Context) -> Draft:
        """A draft whose tokens_BN[:, 0] equals context.root_B."""


class AcceptanceRule(Protocol):
    """Decides which path survives. `exact` says whether the output is the target's own."""

    exact: bool

    def first(self, logits_BV: Tensor, uniform: Uniform) -> Tensor:
        """The first root of each row, from the last prompt position's logits."""

    def accept(self, draft: Draft, logits_BNV: Tensor, uniform: Uniform) -> Verdict:
        """The surviving path of each row and the token that follows it."""


class DraftHeads(Protocol):
    """Modules that guess the tokens after next from the target's hidden state, and maybe the root."""

    config: Any

    def inputs(self, hidden: Tensor, path: Tensor) -> Tensor:
        """What the heads see [..., I], from hidden states [..., H] and ids from the root they decided on [..., n]."""

    def __call__(self, inputs: Tensor) -> Tensor:
        """inputs [..., I] to draft logits [..., K, W] over the W entries of the draft vocabulary."""

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft-vocabulary indices to the target's token ids, same shape."""


class PathHeads(DraftHeads, Protocol):
    """Heads that also see the guesses before theirs, asked level by level."""

    def first_sums(self, inputs: Tensor) -> Tensor:
        """What hidden state and root bring to every head's first block [..., K, H]."""

    def guess_rows(self, ids: Tensor) -> Tensor:
        """The rows [..., H] that stand for guesses [...]."""

    def path_sums(self, rows: Tensor, guess: int) -> Tensor:
        """What guess number `guess` (from 1) brings to the heads from that number on [..., K - guess, H]."""

    def head_logits(self, hidden: Tensor, sums: Tensor, head: int) -> Tensor:
        """Draft logits [..., W] of one head, from hidden [..., H] and its sums [..., H]."""


class HeadFormat(Protocol):
    """One folder layout for heads: recognised by what it holds, never by failing."""

    name: str

    def detect(self, folder: Path) -> bool:
        """True when `folder` is of this format."""

    def read_config(self, folder: Path) -> Any:
        """What the heads are and belong to, without their numbers; FormatError as `read`."""

    def read(self, folder: Path) -> Any:
        """The heads as stored; FormatError when a file is missing, corrupt or truncated."""

    def write(self, heads: Any, folder: Path) -> None:
        """Write atomically: a kill leaves the old files or the new ones."""
