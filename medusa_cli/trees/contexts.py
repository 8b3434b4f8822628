"""What a step costs by the tokens before it, as rows of a table and as words. Prints nothing, measures nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_MIB = 2**20


@dataclass(frozen=True)
class ContextCost:
    """What steps over some numbers of nodes cost at one length of the text.

    context      tokens in the cache; where the model has no positions left for the nodes behind them, so many fewer
    seconds      medians by nodes verified, the root included; the drafter's own time is not in them
    cache_bytes  keys and values that such a step reads
    """

    context: int
    seconds: Mapping[int, float]
    cache_bytes: int


@dataclass(frozen=True)
class Growth:
    """From the shortest context to the longest, for one number of nodes."""

    nodes: int
    seconds: float
    cache_bytes: int

    @property
    def bytes_per_second(self) -> float | None:
        """How fast the further keys and values are read; None where no time or no byte was added."""
        return self.cache_bytes / self.seconds if self.seconds > 0 and self.cache_bytes > 0 else None


def growth(costs: Sequence[ContextCost], nodes: int) -> Growth:
    """What the longest context adds to the shortest."""
    first, last = costs[0], costs[-1]
    return Growth(nodes, last.seconds[nodes] - first.seconds[nodes], last.cache_bytes - first.cache_bytes)


def as_bytes(costs: Sequence[ContextCost], nodes: int) -> list[float]:
    """Seconds at each context if they grew from the first to the last just as the bytes of the cache do."""
    added, first = growth(costs, nodes), costs[0]
    if not added.cache_bytes:
        return [first.seconds[nodes]] * len(costs)
    share = [(cost.cache_bytes - first.cache_bytes) / added.cache_bytes for cost in costs]
    return [first.seconds[nodes] + part * added.seconds for part in share]


def to_text(costs: Sequence[ContextCost]) -> str:
    """A table, a line for each context, and a sentence for each number of nodes."""
    counts = sorted(costs[0].seconds)
    most = counts[-1]
    names = [f"{_nodes(count)}, ms" for count in counts]
    head = (
        f"{'context':>9}"
        + "".join(f"{name:>14}" for name in names)
        + f"{'ratio':>8}{'cache, MiB':>12}{'by bytes, ms':>14}"
    )
    lines = ["cost of a step by context:", head]
    for cost, even in zip(costs, as_bytes(costs, 1), strict=True):
        times = "".join(f"{1000 * cost.seconds[count]:14.2f}" for count in counts)
        ratio = cost.seconds[most] / cost.seconds[1]
        lines.append(f"{cost.context:9}{times}{ratio:7.2f}x{cost.cache_bytes / _MIB:12.1f}{1000 * even:14.2f}")
    return "\n".join([*lines, "", *_sentences(costs)])


def _sentences(costs: Sequence[ContextCost]) -> list[str]:
    """What the longest context adds, in words; the last column explained."""
    if len(costs) < 2:
        return []
    said = ["by bytes: 1 node's cost, were it to grow between the ends just as the cache that a step reads."]
    for nodes in sorted(costs[0].seconds):
        added = growth(costs, nodes)
        speed = added.bytes_per_second
        rate = f": {speed / 1e9:.3g} GB/s" if speed else ""
        said.append(
            f"{_nodes(nodes)}: {costs[-1].context} tokens take {1000 * added.seconds:.2f} ms more than "
            f"{costs[0].context}, and read {added.cache_bytes / _MIB:.1f} MiB more{rate}."
        )
    return said


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"
