"""Rows: texts being written side by side, each at its own speed, with one cache between them.

Knows stops and budgets; knows no drafter and no rule. Active rows are always rows 0 to n - 1 of the cache.
Shape letters: B active rows, N tree nodes, D places on a path, H hidden.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from medusa_cli.acceptance.random_streams import Stream, uniform_of
from medusa_cli.acceptance.sampling import GREEDY, Choosing, rule_of, shaped_nodes
from medusa_cli.contracts import AcceptanceRule, Context, Draft, Memory, Seen, Step, Uniform, Verdict
from medusa_cli.decode.finite import NotFinite
from medusa_cli.errors import TargetError
from medusa_cli.kernels.argmax import have_best
from medusa_cli.model.cache import BLOCK, TreeCache

AHEAD = 512  # tokens of a text that there is room for from the start: many texts end before their budget does
LEND_FROM = 4  # tokens a shared beginning must have: copying less costs more than reading it

FinishReason = Literal["stop", "length", "cancelled", "error"]

Lendable = Callable[[int, int, int], int]
"""(a row's prompt tokens, its committed tokens, tokens of a prompt that joins) -> committed tokens that are the same"""

FindStop = Callable[[Sequence[int]], int | None]
"""Told the new ids of one text, each once and in order: how many of these reach a stop string, or None."""


@dataclass(frozen=True)
class Limits:
    """When a text ends: at a stop, at its budget, or where the context is full.

    max_new_tokens  budget of new tokens, at least 1
    stop_ids        the text ends with the first of these, which belongs to it
    context_limit   prompt and text together hold at most this many tokens
    new_finder      makes what finds stop strings, for each text its own
    """

    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    context_limit: int | None = None
    new_finder: Callable[[], FindStop] | None = None

    def budget(self, prompt_tokens: int) -> int:
        """New tokens allowed after a prompt of this length."""
        if self.context_limit is None:
            return self.max_new_tokens
        return min(self.max_new_tokens, self.context_limit - prompt_tokens)

    def columns_at_first(self, prompt_tokens: int) -> int:
        """Columns that a text will need, or so many that growing by blocks from there on is a small matter."""
        ahead = min(max(0, self.budget(prompt_tokens)), AHEAD)
        return -(-(prompt_tokens + ahead) // BLOCK) * BLOCK


@dataclass
class Row:
    """One text: `tokens` is prompt and new ids, the root included; `kept` and `num_nodes` have an entry a step.

    choosing    the rule that decides its tokens, and what reworks logits before it
    stream      where its random numbers come from
    speculate   whether it wants guesses
    owner       whose it is: texts of others lend it nothing
    lent        tokens of its prompt that were not read, as their keys and values were there
    error       why it could not be written to its end, where finish_reason is "error"
    """

    key: int
    tokens: list[int]
    prompt_tokens: int
    limits: Limits
    choosing: Choosing = GREEDY
    stream: Stream = field(default_factory=Stream)
    speculate: bool = True
    owner: str = ""
    lent: int = 0
    finish_reason: FinishReason | None = None
    error: TargetError | None = None
    kept: list[int] = field(default_factory=list)
    num_nodes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._find_stop = self.limits.new_finder() if self.limits.new_finder else None

    @property
    def new_tokens(self) -> list[int]:
        """The text without its prompt."""
        return self.tokens[self.prompt_tokens :]

    @property
    def most_tokens(self) -> int:
        """Ids that prompt and text may have together."""
        return self.prompt_tokens + self.limits.budget(self.prompt_tokens)

    def take(self, offered: Sequence[int]) -> int:
        """Append as many of the offered ids as stops and budget allow; returns how many. Sets finish_reason."""
        left = self.most_tokens - len(self.tokens)
        allowed = list(offered[:left])
        stop = next((place + 1 for place, token in enumerate(allowed) if token in self.limits.stop_ids), None)
        if self._find_stop is not None:
            text_stop = self._find_stop(allowed[:stop])
            stop = text_stop if text_stop is not None else stop
        if stop is not None:
            allowed, self.finish_reason = allowed[:stop], "stop"
        elif len(allowed) == left:
            self.finish_reason = "length"
        self.tokens += allowed
        return len(allowed)


class Rows:
    """The rows of one run and the state a step needs: their cache, roots and hidden states."""

    def __init__(self, cache: TreeCache) -> None:
        self.cache = cache
        self.active: list[Row] = []
        self.root_B: Tensor | None = None
        self.hidden_BH: Tensor | None = None
        self.accepted_hidden_BDH: Tensor | None = None

    @property
    def context(self) -> Context:
        """What a drafter may see."""
        assert self.root_B is not None
        assert self.hidden_BH is not None
        speculate = [row.speculate for row in self.active]
        return Context(
            [row.tokens for row in self.active],
            self.root_B,
            self.hidden_BH,
            self.accepted_hidden_BDH,
            None if all(speculate) else speculate,
        )

    @property
    def rule(self) -> AcceptanceRule:
        """What decides the active rows' tokens."""
        return rule_of([row.choosing.rule for row in self.active])

    @property
    def uniform(self) -> Uniform:
        """Random numbers for the active rows."""
        assert self.root_B is not None
        places = [len(row.tokens) - row.prompt_tokens for row in self.active]
        return uniform_of([row.stream for row in self.active], places, self.root_B.device)

    def shaped(self, logits_BNV: Tensor, draft: Draft) -> Tensor:
        """The logits as each row's generation settings ask; as they are where nothing is asked."""
        return shaped_nodes(logits_BNV, draft, [row.choosing.shaping for row in self.active], self.active)

    def lend_prefix(self, joining: Sequence[Row], lendable: Lendable) -> None:
        """Give the rows that join the longest beginning that an active row shares with all of them.

        Texts of one chat template, or of one long system prompt, need it read once. The last token of a prompt is
        always left to be read: it decides the first new one.

        lendable   how much of what a row holds is as a prompt's own reading would have it
        """
        first = joining[0]
        shared = min(min(_same(first, row), len(row.tokens) - 1) for row in joining)
        place = len(self.active)
        # a row's root is among its tokens and not in the cache
        held = [
            min(
                shared,
                _same(first, row),
                *(lendable(row.prompt_tokens, length, len(each.tokens)) for each in joining),
            )
            for row, length in zip(self.active, self.cache.lengths[:place], strict=True)
        ]
        longest = max(held, default=0)
        if longest >= LEND_FROM:
            self.cache.copy_prefix(held.index(longest), slice(place, place + len(joining)), longest)

    def admit(self, rows: Sequence[Row], seen: Seen, root_B: Tensor) -> None:
        """Add freshly prefilled rows behind the active ones, each with its first decided token.

        Raises NotFinite, before any row has changed, when logits that decided one are not finite.
        """
        roots, finite_B = torch.stack([root_B, _judged(seen.logits_BNV, rows)[:, 0]]).tolist()
        NotFinite.raise_for(rows, finite_B)
        for row, root in zip(rows, roots, strict=True):
            row.take([root])
        self.active += rows
        self.root_B = root_B if self.root_B is None else torch.cat([self.root_B, root_B])
        hidden_BH = seen.hidden_BNH[:, 0]
        self.hidden_BH = hidden_BH if self.hidden_BH is None else torch.cat([self.hidden_BH, hidden_BH])
        # Rows that join have no accepted path yet: drafters that use it are told to start anew.
        self.accepted_hidden_BDH = None

    def limit(self, verdict: Verdict, draft: Draft, seen: Seen) -> Verdict:
        """Cut each row's path at stops and budgets. The one place that does, and the one host read of a step.

        A row gains the path's guesses and the token after them; when m of these are allowed, m nodes are kept, and
        the m-th gained token is decided but never forwarded: the cache holds nothing past a stop.
        Raises NotFinite, before any row has changed, when logits at a node of a path are not finite.
        """
        nodes_BD = verdict.path_BD.clamp(min=0)  # past the end: the root, which is on every path
        tokens_BD = draft.tokens_BN.gather(1, nodes_BD)
        finite_B = _judged(seen.logits_BNV, self.active).gather(1, nodes_BD).amin(1)
        packed = torch.cat(
            [finite_B[:, None], verdict.kept_B[:, None], verdict.next_B[:, None], verdict.path_BD, tokens_BD], dim=1
        ).tolist()
        NotFinite.raise_for(self.active, [finite for finite, *_ in packed])
        num_places = verdict.path_BD.shape[1]
        paths, kept = [], []
        for row, (_, count, following, *rest) in zip(self.active, packed, strict=True):
            path, tokens = rest[:num_places], rest[num_places:]
            kept.append(row.take([*tokens[1:count], following]))
            row.kept.append(kept[-1])
            row.num_nodes.append(draft.tree.num_nodes)
            paths.append(path)
        return Verdict(verdict.path_BD, verdict.kept_B, verdict.next_B, paths, kept)

    def advance(self, draft: Draft, verdict: Verdict, seen: Seen) -> Step:
        """The deepest kept node's hidden state decided the next root; finished rows are left as they are."""
        assert verdict.kept is not None
        assert verdict.paths is not None
        path_BD = verdict.path_BD.clamp(min=0)
        hidden_BDH = seen.hidden_BNH.gather(1, path_BD[..., None].expand(-1, -1, seen.hidden_BNH.shape[-1]))
        last_B = (verdict.kept_B - 1)[:, None, None].expand(-1, 1, hidden_BDH.shape[-1])
        self.hidden_BH = hidden_BDH.gather(1, last_B)[:, 0]
        self.accepted_hidden_BDH = hidden_BDH
        self.root_B = verdict.next_B
        gained = [row.tokens[len(row.tokens) - kept :] for row, kept in zip(self.active, verdict.kept, strict=True)]
        every_B1 = torch.arange(len(path_BD), device=path_BD.device)[:, None]
        taps_BDLH = None if seen.taps_BNLH is None else seen.taps_BNLH[every_B1, path_BD]
        return Step(gained, draft.tree.num_nodes, draft, verdict.paths, hidden_BDH, taps_BDLH)

    @torch.inference_mode()
    def retire(self, memory: Memory) -> list[Row]:
        """Take finished rows out; the last active rows move into the holes they leave, in the drafter's memory too."""
        finished = [row for row in self.active if row.finish_reason is not None]
        if not finished:
            return []
        order = list(range(len(self.active)))
        for index in reversed(range(len(self.active))):
            if self.active[index].finish_reason is not None:
                last = len(order) - 1
                if index != last:
                    self.cache.copy_row(last, index)
                    memory.move(last, index)
                    order[index] = order[last]
                    self.active[index] = self.active[last]
                self.cache.drop(last)
                memory.drop(last)
                order.pop()
                self.active.pop()
        assert self.root_B is not None
        assert self.hidden_BH is not None
        index_B = torch.tensor(order, dtype=torch.long, device=self.root_B.device)
        self.root_B, self.hidden_BH = self.root_B[index_B], self.hidden_BH[index_B]
        if self.accepted_hidden_BDH is not None:
            self.accepted_hidden_BDH = self.accepted_hidden_BDH[index_B]
        return finished


def _judged(logits_BNV: Tensor, rows: Sequence[Row]) -> Tensor:
    """1 where logits as the target gave them can decide a token, else 0 [B, N]; 1 where a row's settings mend them."""
    judged_BN = have_best(logits_BNV).long()
    mended = [index for index, row in enumerate(rows) if row.choosing.mends]
    if mended:
        judged_BN[mended] = 1
    return judged_BN


def _same(one: Row, other: Row) -> int:
    """How many tokens two texts of one owner begin alike with: how long a prompt takes must tell others nothing."""
    if one.owner != other.owner:
        return 0
    pairs = zip(one.tokens, other.tokens, strict=False)
    differing = (place for place, (a, b) in enumerate(pairs) if a != b)
    return next(differing, min(len(one.tokens), len(other.tokens)))
