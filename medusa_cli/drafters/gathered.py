"""A drafter of guesses that are gathered on the host, from one source or several, under one budget of nodes.

`ngram` is this with one source; `mixed` adds the heads. Whoever can guess tokens can be a source.
Shape letters: B rows, K heads, R ranks.
"""

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from math import exp
from typing import Protocol

import torch

from medusa_cli.contracts import Context, Draft, DraftHeads
from medusa_cli.drafters.trie import ROOT, Picked, Trie, draft_of

SLOWLY = 0.01


class Source(Protocol):
    """Adds guesses to each row's trie."""

    def start(self, context: Context) -> None:
        """Rows are other ones than before."""

    def plant(self, context: Context, tries: Sequence[Trie]) -> None:
        """Guesses for the tokens after each row's root."""


class Budget:
    """How many nodes pay: at most `size`, and no more than their chances are worth on this machine.

    A node costs time and saves time when it is kept. With S tokens written in the time of a plain step, n nodes are
    worth their chances summed, less S times what they add to a step's cost in plain steps. S is what was reached so
    far. cost_N holds seconds of a step by nodes, the root included; without it, `size` nodes are always taken.
    """

    def __init__(self, size: int, cost_N: Mapping[int, float] | None = None) -> None:
        self.size = size
        self._extra = _extra_costs(size, cost_N) if cost_N else None
        self._tokens = self._steps = 1.0

    def num_nodes(self, chances: Sequence[Sequence[float]]) -> int:
        """Nodes for a step, the roots left out, given each row's chances from the best down."""
        most = max(map(len, chances))
        if self._extra is None or not most:
            return min(self.size, most)
        worth = best = 0.0
        count = 0
        for nodes in range(1, min(self.size, most) + 1):
            worth += sum(row[nodes - 1] for row in chances if len(row) >= nodes) / len(chances)
            if (gain := worth - self._speed * self._extra[nodes]) > best:
                best, count = gain, nodes
        return count

    def learn(self, gained: float, num_nodes: int) -> None:
        """A step of so many guesses has gained so many tokens a row: running means over some hundred steps."""
        if self._extra is not None:
            self._tokens += SLOWLY * (gained - self._tokens)
            self._steps += SLOWLY * (1 + self._extra[num_nodes] - self._steps)

    @property
    def _speed(self) -> float:
        """Tokens written in the time of a plain step."""
        return self._tokens / self._steps


def _extra_costs(size: int, cost_N: Mapping[int, float]) -> list[float]:
    """What a step of so many guesses costs beyond a plain one, in plain steps; between measured sizes by a line."""
    known = sorted(cost_N.items())
    return [max(0.0, _at(known, guesses + 1) / cost_N[known[0][0]] - 1) for guesses in range(size + 1)]


def _at(known: Sequence[tuple[int, float]], nodes: int) -> float:
    """Seconds for this many nodes."""
    for (low, below), (high, above) in zip(known, known[1:], strict=False):
        if nodes <= high:
            return below + (above - below) * (nodes - low) / (high - low)
    (low, below), (high, above) = known[-2:] if len(known) > 1 else (known[0], known[0])
    return above + ((above - below) / (high - low) * (nodes - high) if high > low else 0.0)


class GatheredDrafter:
    """Asks every source, and drafts the likeliest guesses that the budget pays for."""

    def __init__(self, sources: Sequence[Source], budget: Budget) -> None:
        self.sources = sources
        self.budget = budget
        self.size = budget.size
        self._before: tuple[int, int] | None = None  # tokens of all rows, and guesses, at the last step

    def start(self, context: Context) -> None:
        """Rows are other ones than before."""
        self._before = None
        for source in self.sources:
            source.start(context)

    @torch.inference_mode()
    def propose(self, context: Context) -> Draft:
        """One tree for each row; the root alone where nothing is likely enough. Reads guesses on the host."""
        so_far = sum(map(len, context.tokens))
        if self._before is not None:
            self.budget.learn((so_far - self._before[0]) / len(context.tokens), self._before[1])
        tries = [Trie(tokens[-1]) for tokens in context.tokens]
        for source in self.sources:
            source.plant(context, tries)
        likeliest = [trie.likeliest(self.size) for trie in tries]
        chances = [[trie.chances[node] for node in nodes] for trie, nodes in zip(tries, likeliest, strict=True)]
        count = self.budget.num_nodes(chances)
        self._before = so_far, count
        picked = [Picked(trie, nodes[:count]) for trie, nodes in zip(tries, likeliest, strict=True)]
        return draft_of(picked, context.root_B.device)


class HeadGuesses:
    """Medusa heads as a source: the likeliest paths by the product of the heads' chances."""

    def __init__(self, heads: DraftHeads, size: int) -> None:
        self.heads = heads
        self.size = size
        self.num_ranks = min(size, heads.config.draft_vocab)

    def start(self, context: Context) -> None:
        """Heads remember nothing between steps."""

    def plant(self, context: Context, tries: Sequence[Trie]) -> None:
        """The `size` likeliest paths of each row."""
        logits_BKW = self.heads(self.heads.inputs(context.hidden_BH, context.root_B))
        best = logits_BKW.float().log_softmax(-1).topk(self.num_ranks, dim=-1)
        ids_BKR = self.heads.to_target_ids(best.indices).tolist()
        for trie, ids_KR, logp_KR in zip(tries, ids_BKR, best.values.tolist(), strict=True):
            _plant_likeliest(trie, ids_KR, logp_KR, self.size)


def _plant_likeliest(
    trie: Trie, ids_KR: Sequence[Sequence[int]], logp_KR: Sequence[Sequence[float]], size: int
) -> None:
    """Best-first: after a path come its next sibling and its first child, neither of which is likelier."""
    waiting = [(-logp_KR[0][0], 0, 0, ROOT, 0.0)]  # (cost, head, rank, parent, log-chance of the parent)
    for _ in range(size):
        if not waiting:
            return
        cost, head, rank, parent, before = heappop(waiting)
        node = trie.grow(parent, ids_KR[head][rank], exp(-cost))
        if rank + 1 < len(ids_KR[head]):
            heappush(waiting, (-(before + logp_KR[head][rank + 1]), head, rank + 1, parent, before))
        if head + 1 < len(ids_KR):
            heappush(waiting, (cost - logp_KR[head + 1][0], head + 1, 0, node, -cost))
