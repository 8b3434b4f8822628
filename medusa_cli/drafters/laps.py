"""What each step took and brought, as seen by a drafter: from one time that it is asked to the next. Told the time."""

from collections.abc import Callable
from dataclasses import dataclass

from medusa_cli.contracts import Context


@dataclass(frozen=True)
class Lap:
    """Seconds of a step, and tokens that it brought a row on average."""

    seconds: float
    tokens: float


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
            last = Lap(now - self._begun, (num_tokens - self._num_tokens) / len(context.tokens))
        self._begun, self._num_tokens = now, num_tokens
        return last
