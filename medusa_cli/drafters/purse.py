"""The purse: time that guesses may lose against plain steps. It alone owns that time, whoever drafts.

Guesses are allowed while a text can't lose more by them than a few plain steps, however wrong all else that is believed
may be: what a step costs, what guesses are worth, how busy the machine is. What they gain in a text may be lost in it.
Trials (guesses that aren't known to pay) must be saved for as well, over all texts.
"""

from dataclasses import dataclass
from math import log

from medusa_cli.drafters.step_costs import Lap, Pace

# in plain steps; a text of 200 tokens may lose 6 of them
TEXT_AT_FIRST, TEXT_A_TOKEN = 3.8, 0.004  # that a text may lose
SHORT, LATER = 200, 0.02  # tokens of a text, after which each allows so much more
TRIALS_AT_FIRST, TRIALS_A_TOKEN, TRIALS_MOST = 4.0, 0.015, 4.0  # that trials may lose
PLAIN_FIRST, PLAIN_EVERY = 8, 32  # steps from a plain one to the next: soon at first, then rarely
ODD = 1.5  # a step that takes so many times what it should: has the machine become busy, or are such steps dearer now?
MOVED = log(1.2)  # the level since the last plain step, as a logarithm: the same question
WON, PATIENCE = 8.0, 2  # plain steps that a text has won, with which it can do so many odd steps without an answer
DEARER = 1.6  # than is believed may a step be that must not cost more than a text can lose
LEARNING = 2  # steps of a run that are plain, come what may
CALMER = 1.01  # by which, a step, the calm that limits are told in forgets
INTERRUPTED = 6.0  # plain steps that one step may have lost by guesses: more is an interruption
SLOW_START = 5.0  # a first step that takes so many times as long as others: the first of every size will
FIRST_STEPS = 0.015  # of all the time that plain steps would have taken so far, that slow first steps may take


class Purse:
    """Asked before a step, told after it."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.lost = 0.0  # seconds, in this text; less than none: won
        self._lost_on_trials = 0.0
        self._tokens = 0.0  # of the latest text
        self._calm = 1.0  # the level when nobody disturbs
        self._plain = Turn(PLAIN_FIRST, PLAIN_EVERY, left=0)
        self._look = False  # the next step must be plain
        self._odd: list[_Odd] = []
        self._steps = self._doubts = 0
        self._level = 0.0  # at the latest plain step, as a logarithm
        self._first = 0.0  # seconds of the first step
        self._written = self._first_steps = 0.0  # seconds of plain steps for all texts, and lost on first ones of sizes
        self._sizes: set[int] = set()  # that were verified in this run

    def begin(self, alone: bool) -> None:
        """A text begins; alone: no other is being written. What others have won isn't its own."""
        self.lost = 0.0 if alone else max(0.0, self.lost)
        self._tokens = 0.0
        self._odd.clear()

    def must_look(self, rows: int) -> bool:
        """Whether the next step must be a plain one, to learn what these cost now. Called once a step."""
        look = self._look or self._steps < LEARNING or rows not in self._sizes
        return self._plain.take() or look

    def allows(self, asking: float, rows: int, nodes: int, *, trial: bool) -> bool:
        """Whether the next step may verify so many nodes, with so many seconds of guessing before."""
        plain = self.pace.seconds(rows)
        step = plain * min(1.0, self._calm / self.pace.level)
        seconds = asking + DEARER * self.pace.seconds(nodes) - plain + self._slow_start(nodes)
        if trial and seconds > TRIALS_AT_FIRST * step - self._lost_on_trials:
            return False
        return seconds <= TEXT_AT_FIRST * step - self.lost

    def _slow_start(self, nodes: int) -> float:
        """Seconds that the first step of a size takes more than others; none where all texts so far have saved them."""
        if nodes in self._sizes:
            return 0.0
        times = self._first / self.pace.seconds(1)
        more = (times - 1) * self.pace.seconds(nodes) if times > SLOW_START else 0.0
        return more if more > FIRST_STEPS * self._written - self._first_steps else 0.0

    def saw(self, nodes: int, rows: int, lap: Lap, *, guesses: bool, trial: bool) -> None:
        """A step over so many nodes has ended.

        guesses   whether it had some that were expected to come true
        trial     whether it wasn't known to pay
        """
        believed, is_new = self.pace.seconds(nodes), not self.pace.knows(nodes)
        self.pace.saw(nodes, rows, lap, guesses=guesses)
        if nodes not in self._sizes:
            self._sizes.add(nodes)
            self._first_steps += max(0.0, lap.verified - believed) * (nodes > rows)
        self._steps += 1
        self._first = self._first or lap.verified
        self._calm = min(self._calm * CALMER, self.pace.level) if self._steps > LEARNING else self.pace.level
        plain = self.pace.seconds(rows)
        if nodes == rows:
            self._charge(lap.asked, trial)
            self._forgive(lap)
            self._level = log(self.pace.level)
            self._look, self._doubts = False, 0
        else:
            # where a step is quicker than its like, plain ones are too
            plain *= min(1.0, lap.verified / self.pace.seconds(nodes))
            lost = min(lap.seconds - lap.tokens * plain, INTERRUPTED * plain)
            self._charge(lost, trial)
            odd = lap.verified > ODD * believed
            if odd and lost > 0:
                self._odd.append(_Odd(lost, lap.tokens, plain, trial))
            self._doubts += odd or abs(log(self.pace.level) - self._level) > MOVED
            enough = 1 if self.lost > -WON * plain else PATIENCE
            self._look = is_new or trial or self._doubts >= enough
        self._tokens += lap.tokens
        self._written += plain * lap.tokens
        self.lost -= (TEXT_A_TOKEN if self._tokens <= SHORT else LATER) * plain * lap.tokens
        most = (TRIALS_AT_FIRST - TRIALS_MOST) * plain
        self._lost_on_trials = max(most, self._lost_on_trials - TRIALS_A_TOKEN * plain * lap.tokens)

    def missed(self, nodes: int, rows: int, asked: float, *, trial: bool) -> None:
        """A step whose end nobody saw, since rows came or went: it may have brought nothing."""
        if nodes > rows:
            self._charge(asked + self.pace.seconds(nodes) - self.pace.seconds(rows), trial)

    def _charge(self, seconds: float, trial: bool) -> None:
        self.lost += seconds
        self._lost_on_trials += seconds * trial

    def _forgive(self, plain: Lap) -> None:
        """What took so long was the machine, as far as plain steps take longer too."""
        for odd in self._odd:
            self._charge(-min(odd.lost, odd.tokens * max(0.0, plain.verified - odd.plain)), odd.trial)
        self._odd.clear()


@dataclass(frozen=True)
class _Odd:
    """A step that took far longer than it should: what it lost, if a plain step took so long as was believed then."""

    lost: float
    tokens: float
    plain: float
    trial: bool


class Turn:
    """When something is to be done again: after `first` steps, then after twice as many each time, up to `every`."""

    def __init__(self, first: int, every: int, *, left: int) -> None:
        self._wait, self._every = first, every
        self._left = left

    @property
    def due(self) -> bool:
        """Whether it is to be done at the next step that can."""
        return self._left <= 0

    def take(self, can: bool = True) -> bool:
        """A step more: whether it is done now."""
        if self._left > 0 or not can:
            self._left -= 1
            return False
        self._left = self._wait - 1
        self._wait = min(self._every, 2 * self._wait)
        return True
