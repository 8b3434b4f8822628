"""The best static tree for a node budget, from measured accuracies and measured step costs.

Shape letters: K heads, R ranks. `accuracy_KR[k][r]` is the measured chance that head k's rank r is right, given that
the path above it is right; the model is that this chance depends on the head and the rank only. Knows no model.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise

from medusa_cli.errors import TreeError
from medusa_cli.trees.tree import Path, TokenTree

Accuracies = Sequence[Sequence[float]]
GAIN = 1.03  # a smaller one is no promise: measured costs differ by as much from one time to the next


@dataclass(frozen=True)
class Choice:
    """A tree size and what it promises against plain decoding. `size` leaves the root out; 0 means no tree pays."""

    size: int
    expected_tokens: float
    cost_ratio: float
    speedup: float


def best_tree(accuracy_KR: Accuracies, size: int) -> TokenTree:
    """The tree of at most `size` nodes (the root not counted) that is expected to accept the most tokens.

    Nodes are taken in falling order of path probability. A node is never likelier than its parent, so the `size`
    likeliest paths are closed under taking prefixes, and no other tree has a larger sum (Medusa, arXiv 2401.10774,
    section 2.3.3). Fewer nodes come back when the heads offer no more paths of a probability above 0.
    """
    return TokenTree.from_paths(path for path, _ in islice(_best_first(accuracy_KR), size))


def path_probability(path: Sequence[int], accuracy_KR: Accuracies) -> float:
    """The chance that every node of this rank path is right."""
    probability = 1.0
    for accuracy_R, rank in zip(accuracy_KR, path, strict=False):
        probability *= accuracy_R[rank]
    return probability


def expected_tokens(tree: TokenTree, accuracy_KR: Accuracies) -> float:
    """Tokens gained in one step on average: 1 that the target gives anyway, and one for each node that is right.

    Raises TreeError when the tree needs a head or a rank that was not measured.
    """
    tree.check_fits(len(accuracy_KR), min((len(accuracy_R) for accuracy_R in accuracy_KR), default=0))
    return 1.0 + sum(path_probability(path, accuracy_KR) for path in tree.paths())


def gain_curve(accuracy_KR: Accuracies, max_size: int) -> list[float]:
    """Expected tokens a step of the best tree of each size from 0 to `max_size`; it never falls."""
    gains = list(accumulate((p for _, p in islice(_best_first(accuracy_KR), max_size)), initial=1.0))
    return gains + gains[-1:] * (max_size + 1 - len(gains))


def choose_size(gains: Sequence[float], cost_of_nodes: Mapping[int, float], max_size: int) -> Choice:
    """The size that gains the most tokens a second; the smallest of equals, and 0 when nothing pays by more than GAIN.

    gains          from `gain_curve`: expected tokens a step, by size
    cost_of_nodes  measured seconds of a step by number of nodes verified, the root included; the entry for 1 is a
                   plain step, without drafting, and the others include it. Raises TreeError as `StepCost` does
    """
    cost = StepCost(cost_of_nodes)
    sizes = range(min(max_size, len(gains) - 1) + 1)
    best = max((predict(size, gains[size], cost) for size in sizes), key=lambda choice: choice.speedup)
    return best if best.speedup > GAIN else predict(0, gains[0], cost)


def predict(size: int, tokens: float, cost: "StepCost") -> Choice:
    """What a tree of `size` nodes that gains `tokens` a step promises at this step cost."""
    ratio = cost.ratio(size + 1)
    return Choice(size, tokens, ratio, tokens / ratio)


class StepCost:
    """Seconds of a step as a curve over the nodes it verifies (the root included).

    Measured points are made monotone by pooling neighbours that fall (isotonic regression: noise in either point
    is as likely), joined by straight lines, and continued past the last one with the last slope.
    Raises TreeError when the plain step (1 node) was not measured or a point is not a time.
    """

    def __init__(self, points: Mapping[int, float]) -> None:
        if 1 not in points or any(nodes < 1 or not 0 < seconds < float("inf") for nodes, seconds in points.items()):
            raise TreeError(
                f"step costs {dict(points)} are no curve",
                "give seconds above 0 by number of nodes, 1 node (the plain step) among them",
            )
        self._nodes = sorted(points)
        self._seconds = never_falling([points[nodes] for nodes in self._nodes])

    def seconds(self, num_nodes: int) -> float:
        """Seconds of a step that verifies `num_nodes` nodes."""
        if len(self._nodes) == 1:
            return self._seconds[0]
        pieces = list(pairwise(zip(self._nodes, self._seconds, strict=True)))
        (left, at_left), (right, at_right) = next((p for p in pieces if num_nodes <= p[1][0]), pieces[-1])
        return at_left + (at_right - at_left) * (num_nodes - left) / (right - left)

    def ratio(self, num_nodes: int) -> float:
        """The cost of a step of `num_nodes` nodes in plain steps."""
        return self.seconds(num_nodes) / self.seconds(1)


def never_falling(values: Sequence[float]) -> list[float]:
    """The nearest sequence in least squares that never falls, by pooling adjacent violators."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (right, n), (left, m) = pools.pop(), pools.pop()
            pools.append(((left * m + right * n) / (m + n), m + n))
    return [mean for mean, count in pools for _ in range(count)]


def _falling(values: Sequence[float]) -> list[int]:
    """The places of `values`, the largest value's first; equals keep their order."""
    return sorted(range(len(values)), key=lambda place: -values[place])


def _best_first(accuracy_KR: Accuracies) -> Iterator[tuple[Path, float]]:
    """Every path of a probability above 0 with that probability, likeliest first, parents before children."""
    # Measured accuracies need not fall with the rank, so each head's ranks are walked in order of accuracy.
    order_KR = [_falling(accuracy_R) for accuracy_R in accuracy_KR]
    heap: list[tuple[float, int, Path, int, float]] = []

    def push(above: Path, place: int, above_probability: float) -> None:
        depth = len(above)
        if depth < len(order_KR) and place < len(order_KR[depth]):
            rank = order_KR[depth][place]
            probability = above_probability * accuracy_KR[depth][rank]
            if probability > 0:
                heapq.heappush(heap, (-probability, depth, (*above, rank), place, above_probability))

    push((), 0, 1.0)
    while heap:
        negative, _, path, place, above_probability = heapq.heappop(heap)
        yield path, -negative
        push(path[:-1], place + 1, above_probability)
        push(path, 0, -negative)
