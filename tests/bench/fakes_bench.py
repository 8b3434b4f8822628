"""Fakes of this room: arms that reply by a script, and a clock that only they move."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from medusa_cli.bench.baselines import Reply, StopRule
from medusa_cli.bench.compare import Comparison, compare
from medusa_cli.bench.document import Run
from medusa_cli.bench.prompt_set import BenchPrompt
from medusa_cli.bench.report import Setup
from medusa_cli.bench.run import Plan, Trial, run_bench

STOP = 2
RULE = StopRule(frozenset({STOP}), max_new_tokens=100, context_limit=None)
RUN = Run(
    date="2026-01-01T00:00:00+00:00",
    machine="none",
    versions={},
    command="medusa bench",
    prompts="0",
    num_prompts=1,
    max_new_tokens=100,
    batch_size=1,
    repeats=1,
)
SETUP = Setup(model="tiny", dtype="float32", device="cpu", runner="eager", threads=1)


class FakeClock:
    """Seconds pass only when an arm says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def reply(kept: Sequence[int], num_nodes: int = 1, first: int = 10, stops: bool = False, **more: object) -> Reply:
    """A reply of 1 + sum(kept) ids, counting up from `first`."""
    ids = list(range(first, first + 1 + sum(kept)))
    if stops:
        ids[-1] = STOP
    return Reply(ids, "length", len(kept), list(kept), [num_nodes] * len(kept), **more)


@dataclass
class FakeArm:
    """Replies by the prompt's ids, `seconds` each; every call is written to a list that arms may share."""

    name: str
    clock: FakeClock
    answer: Callable[[tuple[int, ...]], Reply]
    seconds: float = 1.0
    calls: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)

    def generate(self, prompts: Sequence[list[int]]) -> list[Reply]:
        self.calls += [(self.name, tuple(prompt_ids)) for prompt_ids in prompts]
        self.clock.now += self.seconds
        return [self.answer(tuple(prompt_ids)) for prompt_ids in prompts]


def prompts(count: int, category: str = "all") -> list[BenchPrompt]:
    return [BenchPrompt(f"p{n}", category, (100 + n,)) for n in range(count)]


def plan(num_warmups: int = 0, repeats: int = 1, stop: StopRule = RULE, batch_size: int = 1) -> Plan:
    return Plan(num_warmups, repeats, stop, batch_size)


def timed(
    clock: FakeClock, replies: Mapping[str, Sequence[Reply]], seconds: Mapping[str, float], repeats: int = 1
) -> list[Trial]:
    """Trials of arms that give their n-th reply to the n-th prompt."""
    arms = [
        FakeArm(name, clock, lambda ids, mine=mine: mine[ids[0] - 100], seconds[name]) for name, mine in replies.items()
    ]
    rows = prompts(len(next(iter(replies.values()))))
    return run_bench(arms, rows, plan(repeats=repeats), clock, lambda done, total: None)


def no_margin(ids: list[int]) -> object:
    raise AssertionError(f"no reply differs, yet the logits after {ids} were asked for")


def alike(trials: Sequence[Trial]) -> Comparison:
    """The comparison of trials whose replies are all the same."""
    return compare(trials, "medusa", "float32", no_margin)
