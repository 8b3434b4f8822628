"""Step costs as decoding sees them: measured once, doubted from the first step on. Budgets decide by them.

A lap is what a step took and brought, as seen by a drafter: from one time that it is asked to the next. No model and
no draft is known here, and the time is told.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, log
from statistics import median, median_low

from medusa_cli.contracts import Context

LATEST = 5  # steps of a size whose middle one says what it costs: an interruption says nothing
LEVEL = 5  # and of sizes that are known, whose middle one says how busy the machine is; a plain step alone says it too
SLOWLY = 0.02  # weight of the latest step in how fast the text grows
OUTLIER = 3.0  # a step that took more than this many times its cost was interrupted; that says nothing
UNTRIED, FADES = 16, 0.9  # plain steps in a row, after which a size that was found dear is believed to cost less
LEAST = 0.4  # of what it was found to cost
NEAR = 512  # tokens before a step, up to which it is like those that costs are measured at
ENOUGH = 3  # steps of a size that say what it takes
FEW, EACH = 2, 2  # nodes of a row until steps confirm the costs: twice as many after every so many steps with guesses


@dataclass(frozen=True)
class Lap:
    """Seconds of a step, and tokens that it brought a row on average.

    near    of one row, with a short text before
    asked   of the seconds, those that guesses were looked for
    """

    seconds: float
    tokens: float
    near: bool = False
    asked: float = 0.0

    @property
    def verified(self) -> float:
        """Seconds of all the rest: what a step of so many nodes costs."""
        return max(0.0, self.seconds - self.asked)


class Laps:
    """Asked once a step, before anything is guessed."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun: float | None = None
        self._num_tokens = 0

    def restart(self) -> bool:
        """Rows are other ones than before: what the last step brought can't be told any more. Whether there was one."""
        was, self._begun = self._begun is not None, None
        return was

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
            self._seconds.setdefault(nodes, []).append(lap.verified)

    def medians(self) -> dict[int, float]:
        """By nodes, of sizes that were seen often enough."""
        return {nodes: median(seen) for nodes, seen in self._seconds.items() if len(seen) >= ENOUGH}


class Pace:
    """Seconds of a step by the nodes it verifies, and tokens a second so far.

    A step's cost is a table's, times what is common to all sizes (the level: the machine is busier than it was, the
    text is longer), times what is the size's own (the table is wrong there). Both are medians of the latest steps. The
    level is what steps take whose own cost is known, plain ones above all; a size's own is what it took just before a
    plain step, beside that one: so neither is taken for the other. Sizes not yet seen lean on their neighbours. The
    table stands beside the first step of a size as one more opinion, and the lower of the two counts: what seems cheap
    is tried, and what is tried is known.

    first_N   seconds measured beforehand, by nodes of all rows together, roots included
    laps_N    what steps took in earlier runs, by nodes; none: few nodes are taken until steps confirm the table
    """

    def __init__(self, first_N: Mapping[int, float], laps_N: Mapping[int, float] | None = None) -> None:
        self._first = _possible(first_N)
        self._sizes: dict[int, deque[float]] = {}  # what the latest steps of each had of their own, as logarithms
        self._own: list[tuple[int, float]] = []  # their medians; sizes ascend
        self._now: dict[int, float] = {}  # costs as reckoned since the latest step
        self._levels = deque([0.0], maxlen=LEVEL)
        self._level = 0.0  # what is common to all sizes, as a logarithm
        self._last: tuple[int, float] | None = None  # nodes and seconds of the latest step, where it had guesses
        self._untried, self._faded = 0, 1.0  # plain steps since then, and what is left of dear costs
        laps = _possible(laps_N or {})
        for nodes, seconds in laps:
            own = log(seconds / laps[0][1]) - log(_between(self._first, nodes) / _between(self._first, laps[0][0]))
            self._sizes[nodes] = deque([own], maxlen=LATEST)
        self._sum_up()
        self._confirmed = bool(laps)
        self._guessed = 0
        self._steps = 0
        self._tokens, self._seconds = 1.0, self.seconds(1)

    @property
    def tokens_a_second(self) -> float:
        """Of a row, lately."""
        return self._tokens / (self._seconds * self.level)

    @property
    def level(self) -> float:
        """By how much all steps take longer than the table says, lately."""
        return exp(self._level)

    @property
    def most(self) -> int | None:
        """Nodes of a row, the root left out, that may be taken on trust; None: any number."""
        return None if self._confirmed else FEW << (self._guessed // EACH)

    def seconds(self, nodes: int) -> float:
        """What a step of so many nodes costs, as far as is known."""
        if nodes not in self._now:
            self._now[nodes] = _between(self._first, nodes) * exp(self._level + _within(self._own, nodes))
        return self._now[nodes]

    def knows(self, nodes: int) -> bool:
        """Whether such steps were seen beside plain ones, in this run or an earlier one."""
        return nodes in self._sizes

    def saw(self, nodes: int, rows: int, lap: Lap, *, guesses: bool) -> None:
        """A step over so many nodes of so many rows has ended; guesses: some were expected to come true."""
        said = log(max(lap.verified, 1e-9) / _between(self._first, nodes))
        if nodes == rows:
            self._saw_plain(said)
        else:
            if nodes in self._sizes:
                self._levels.append(said - _within(self._own, nodes))
            self._last, self._untried, self._faded = (nodes, said), 0, 1.0
        self._level = median_low(self._levels)
        self._sum_up()
        self._guessed += guesses
        self._steps += 1
        weight = max(SLOWLY, 1 / self._steps)
        seconds = min(lap.seconds, OUTLIER * self.seconds(nodes) + lap.asked)
        self._tokens += weight * (lap.tokens - self._tokens)
        self._seconds += weight * (seconds / self.level - self._seconds)

    def _saw_plain(self, said: float) -> None:
        self._levels.extend([said] * (LEVEL // 2 + 1))
        if self._last is not None:
            nodes, beside = self._last
            told = [_within(self._own, nodes)] if len(self._first) > 1 else []  # a table of plain steps tells nothing
            self._sizes.setdefault(nodes, deque(told, maxlen=LATEST)).append(beside - said)
        self._last = None
        self._untried += 1
        if self._untried % UNTRIED == 0:
            self._faded = max(LEAST, self._faded * FADES)

    def _sum_up(self) -> None:
        """Reckon anew after a step."""
        found = ((nodes, median_low(own)) for nodes, own in sorted(self._sizes.items()) if nodes > 1)
        fade = -log(self._faded)
        self._own = [(1, 0.0), *((nodes, min(own, max(0.0, own - fade))) for nodes, own in found)]
        self._now.clear()


def _possible(costs_N: Mapping[int, float]) -> list[tuple[int, float]]:
    """Nodes never cost more than as many steps: what says otherwise was measured in a busy moment."""
    plain = costs_N.get(1, inf)
    return [(nodes, min(seconds, nodes * plain)) for nodes, seconds in sorted(costs_N.items())]


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
