"""What a tree and every size of tree gain and cost, as numbers. Prints nothing, measures nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from medusa_cli.inspect import render
from medusa_cli.inspect.render import NodeInfo
from medusa_cli.trees.build import Choice, StepCost, choose_size, gain_curve, predict
from medusa_cli.trees.contexts import ContextCost
from medusa_cli.trees.files import Measured
from medusa_cli.trees.tree import TokenTree

BUDGET = (0, 4, 8, 16, 32, 64)
_LEAST_SHOWN = 12


@dataclass(frozen=True)
class Worth:
    """The best tree of a size. cost_ratio (in plain steps) and speedup are None when no step cost is known."""

    size: int
    expected_tokens: float
    cost_ratio: float | None
    speedup: float | None


@dataclass(frozen=True)
class KnownCost:
    """Seconds of a step by nodes verified (the root included), and where they were measured.

    source   here: on this machine, without the drafter's time; heads: where the heads were trained, with it
    The other fields say how, and are None for costs that came with the heads; disturbed: others had the processor
    meanwhile.
    """

    source: Literal["here", "heads"]
    seconds: Mapping[int, float]
    runner: str | None = None
    dtype: str | None = None
    threads: int | None = None
    date: str | None = None
    disturbed: bool = False


@dataclass(frozen=True)
class Inspection:
    """A tree and what was measured of the heads that fill it. Raises TreeError when it doesn't fit these heads.

    here      costs measured on this machine; None: those stored with the heads stand in
    contexts  what a step costs here by the tokens before it, where that was measured; shortest first
    """

    name: str
    tree: TokenTree
    measured: Measured | None
    here: KnownCost | None = None
    contexts: Sequence[ContextCost] = ()

    def __post_init__(self) -> None:
        if self.measured:
            accuracy_KR = self.measured.conditional_KR
            self.tree.check_fits(len(accuracy_KR), len(accuracy_KR[0]) if accuracy_KR else 0)

    @cached_property
    def nodes(self) -> list[NodeInfo]:
        """The nodes, depth first."""
        return render.node_infos(self.tree.paths(), self.measured.conditional_KR if self.measured else None)

    @cached_property
    def expected_tokens(self) -> float | None:
        """Tokens a step on average, the one that the target gives anyway included."""
        gain = render.gain(self.nodes) if self.measured else None
        return None if gain is None else 1.0 + gain

    @cached_property
    def known_cost(self) -> KnownCost | None:
        """The costs that everything here is reckoned with."""
        if self.here is None and self.measured and self.measured.step_cost:
            return KnownCost("heads", self.measured.step_cost)
        return self.here

    @cached_property
    def cost(self) -> StepCost | None:
        """The cost of a step as a curve."""
        return StepCost(self.known_cost.seconds) if self.known_cost else None

    @cached_property
    def prediction(self) -> Choice | None:
        """What this tree promises, where gain and cost are known."""
        if self.cost is None or self.expected_tokens is None:
            return None
        return predict(len(self.nodes), self.expected_tokens, self.cost)

    @cached_property
    def curve(self) -> list[Worth]:
        """The best tree of every size from 0 to the largest of BUDGET; nothing when no accuracies were measured."""
        if self.measured is None:
            return []
        gains = gain_curve(self.measured.conditional_KR, max(BUDGET))
        if self.cost is None:
            return [Worth(size, tokens, None, None) for size, tokens in enumerate(gains)]
        choices = [predict(size, tokens, self.cost) for size, tokens in enumerate(gains)]
        return [Worth(one.size, one.expected_tokens, one.cost_ratio, one.speedup) for one in choices]

    @property
    def budget(self) -> list[Worth]:
        """The rows of the curve that the table shows."""
        return [self.curve[size] for size in BUDGET] if self.curve else []

    @cached_property
    def choice(self) -> Choice | None:
        """The size that pays best, where gain and cost are known."""
        if self.measured is None or self.known_cost is None:
            return None
        gains = [row.expected_tokens for row in self.curve]
        return choose_size(gains, self.known_cost.seconds, max(BUDGET))

    @property
    def shown(self) -> list[Worth]:
        """The part of the curve worth drawing: twice as far as the last size that pays, and at least a little."""
        last = max((row.size for row in self.curve if row.size and (row.speedup or 0) >= 1), default=0)
        return self.curve[: max(_LEAST_SHOWN, 2 * last) + 1]
