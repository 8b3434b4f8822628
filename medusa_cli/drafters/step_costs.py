"""Step costs as decoding sees them: measured once, doubted from the first step on. Budgets decide by them.

A lap is what a step took and brought, as seen by a drafter: from one time that it is asked to the next. No model and
no draft is known here, and the time is told.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import median, median_low

from medusa_cli.contracts import Context

LATEST = 9  # steps of a size whose middle one says what it costs: an interruption says nothing
LEVEL = 5  # and steps of sizes that are known by now, whose middle one says how busy the machine is
KNOWN = 2  # steps of a size that make it known
SLOWLY = 0.02  # weight of the latest step in how fast the text grows
OUTLIER = 3.0  # a step that took more than this many times its cost was interrupted; that says nothing
NEAR = 512  # tokens before a step, up to which it is like those that costs are measured at
ENOUGH = 3  # steps of a size that say what it takes
FEW, EACH = 2, 2  # nodes of a row until steps confirm the costs: twice as many after every so many steps with guesses


@dataclass(frozen=True)
class Lap:
    """Seconds of a step, and tokens that it brought a row on average; near: of one row, with a short text before."""

    seconds: float
    tokens: float
    near: bool = False


class Laps:
    """Asked once a step, before anything is guessed."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun: float | None = None
        self._num_tokens = 0

    def restart(self) -> None:
        """Rows are other ones than before: what the last step brought can't be told any more."""
        self._begun = None

    def lap(self, context: Context) -> Lap | None:
        """The step that ends here, and the next begins; None when there was none with these rows."""
        now, num_tokens = self._clock(), sum(map(len, context.tokens))
        last = None
        if self._begun is not None:
            near = len(context.tokens) == 1 and num_tokens <= NEAR
            last = Lap(now - self._begun, (num_tokens - self._num_tokens) / len(context.tokens), near)
        self._begun, self._num_tokens = now, num_tokens
        return last


class LapTimes:
    """What steps took in this run by the nodes they verified, where that can be held against measured costs."""

    def __init__(self) -> None:
        self._seconds: dict[int, list[float]] = {}

    def add(self, nodes: int, lap: Lap) -> None:
        """A step more."""
        if lap.near:
            self._seconds.setdefault(nodes, []).append(lap.seconds)

    def medians(self) -> dict[int, float]:
        """By nodes, of sizes that were seen often enough."""
        return {nodes: median(seen) for nodes, seen in self._seconds.items() if len(seen) >= ENOUGH}


class Pace:
    """Seconds of a step by the nodes it verifies, and tokens a second so far.

    A step's cost is a table's, times what is common to all sizes (the level: the machine is busier than it was, the
    text is longer), times what is the size's own (the table is wrong there). Both are medians of the latest steps, so
    that a table which is ten times off is unlearnt in a few. Sizes not yet seen lean on their neighbours. The table
    stands beside the first step of a size as one more opinion, and the lower of the two counts: what seems cheap is
    tried, and what is tried is known.

    first_N   seconds measured beforehand, by nodes of all rows together, roots included
    laps_N    what steps took in earlier runs, by nodes; none: few nodes are taken until steps confirm the table
    """

    def __init__(self, first_N: Mapping[int, float], laps_N: Mapping[int, float] | None = None) -> None:
        self._first = sorted(first_N.items())
        self._sizes: dict[int, _Size] = {}
        self._own: list[tuple[int, float]] = []  # what each size seen has of its own, as a logarithm; sizes ascend
        self._now: dict[int, float] = {}  # costs as reckoned since the latest step
        self._levels = deque([0.0], maxlen=LEVEL)
        self._level = 0.0  # what is common to all sizes, as a logarithm
        for nodes, seconds in (laps_N or {}).items():
            self._sizes[nodes] = _Size(deque([log(seconds / _between(self._first, nodes))], maxlen=LATEST))
        self._sum_up()
        self._confirmed = bool(laps_N)
        self._guessed = 0
        self._steps = 0
        self._tokens, self._seconds = 1.0, self.seconds(1)

    @property
    def tokens_a_second(self) -> float:
        """Of a row, lately."""
        return self._tokens / (self._seconds * exp(self._level))

    @property
    def most(self) -> int | None:
        """Nodes of a row, the root left out, that may be taken on trust; None: any number."""
        return None if self._confirmed else FEW << (self._guessed // EACH)

    def seconds(self, nodes: int) -> float:
        """What a step of so many nodes costs, as far as is known."""
        if nodes not in self._now:
            self._now[nodes] = _between(self._first, nodes) * exp(self._level + _within(self._own, nodes))
        return self._now[nodes]

    def saw(self, nodes: int, seconds: float, tokens: float, *, guesses: bool) -> None:
        """A step over so many nodes took so long and brought each row so many tokens."""
        said, own = log(max(seconds, 1e-9) / _between(self._first, nodes)), _within(self._own, nodes)
        size = self._sizes.setdefault(nodes, _Size(deque([own], maxlen=LATEST)))
        # what a new size takes is its own before it is everyone's
        if size.count >= KNOWN or len(self._levels) <= KNOWN:
            self._levels.append(said - own)
            self._level = median_low(self._levels)
        size.own.append(said - self._level)
        size.count += 1
        self._sum_up()
        self._guessed += guesses
        self._steps += 1
        weight = max(SLOWLY, 1 / self._steps)
        seconds = min(seconds, OUTLIER * self.seconds(nodes))
        self._tokens += weight * (tokens - self._tokens)
        self._seconds += weight * (seconds / exp(self._level) - self._seconds)

    def _sum_up(self) -> None:
        """Reckon anew after a step."""
        self._own = [(nodes, median_low(size.own)) for nodes, size in sorted(self._sizes.items())]
        self._now.clear()


@dataclass
class _Size:
    """What the latest steps of a size had of their own, as logarithms, and how many there were."""

    own: deque[float]
    count: int = 0


def _within(known: Sequence[tuple[int, float]], nodes: int) -> float:
    """On the line between the neighbours; that of the nearest beyond the last, and 0 without any."""
    below: tuple[int, float] | None = None
    for size, value in known:
        if size == nodes:
            return value
        if size > nodes:
            return value if below is None else below[1] + (value - below[1]) * (nodes - below[0]) / (size - below[0])
        below = (size, value)
    return 0.0 if below is None else below[1]


def _between(known: Sequence[tuple[int, float]], nodes: int) -> float:
    """Seconds for this many nodes: on the line between the sizes measured, or on the last line beyond them."""
    for (low, below), (high, above) in zip(known, known[1:], strict=False):
        if nodes <= high:
            return below + (above - below) * (nodes - low) / (high - low)
    (low, below), (high, above) = known[-2:] if len(known) > 1 else (known[0], known[0])
    return above + (max(0.0, above - below) / (high - low) * (nodes - high) if high > low else 0.0)
