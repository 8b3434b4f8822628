"""What each step took and brought, as seen by a drafter: from one time that it is asked to the next. Told the time."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from medusa_cli.contracts import Context

NEAR = 512  # tokens before a step, up to which it is like those that costs are measured at
ENOUGH = 3  # steps of a size that say what it takes


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
