"""The figures of a server under load: from what clients heard to one typed document, and to a table of text."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from medusa_cli.bench.report import Table, percentile
from medusa_cli.bench.server_client import Heard, Load


class Percentiles(BaseModel):
    """Milliseconds; None where nothing was measured."""

    p50: float | None
    p90: float | None
    p99: float | None


class ServerFigures(BaseModel):
    """What one arm did under one load.

    failed          requests without a whole answer, by status ("0": nothing was answered)
    tokens_per_step tokens a forward, where the server tells its steps
    ttft_ms         from sending a request to its first words
    itl_ms          between the events of a text that bring words
    e2e_ms          from sending a request to its end
    """

    requests: int
    failed: dict[str, int]
    duration: float
    request_throughput: float
    output_throughput: float
    total_output_tokens: int
    tokens_per_step: float | None
    ttft_ms: Percentiles
    itl_ms: Percentiles
    e2e_ms: Percentiles


class Agreement(BaseModel):
    """How many prompts have the same text as the first arm's, of those that both answered; ids of those that differ."""

    same: int
    of: int
    differ: list[str]


class Level(BaseModel):
    """One load: so many clients, or so many requests a second."""

    concurrency: int | None
    request_rate: float | None
    arms: dict[str, ServerFigures]
    speedup: dict[str, float | None]
    identical: dict[str, Agreement]


class ServerReport(BaseModel):
    """What `medusa bench --url --json` prints."""

    url: str
    model: str
    num_prompts: int
    max_new_tokens: int
    ours: str
    levels: list[Level]
    faults: list[str]
    verdict: str


@dataclass(frozen=True)
class Measured:
    """All that was heard under one load, and the seconds that each arm was asked for."""

    load: Load
    heard: Sequence[Heard]
    seconds: Mapping[str, float]


def level_of(measured: Measured, names: Sequence[str]) -> Level:
    """The figures of one load. The first arm is the subject."""
    arms = {
        name: _figures([each for each in measured.heard if each.arm == name], measured.seconds[name]) for name in names
    }
    ours = arms[names[0]].output_throughput
    return Level(
        concurrency=measured.load.clients,
        request_rate=measured.load.rate,
        arms=arms,
        speedup={
            name: ours / arms[name].output_throughput if arms[name].output_throughput else None for name in names[1:]
        },
        identical={name: _agreement(measured.heard, names[0], name) for name in names[1:]},
    )


def faults_of(heard: Sequence[Heard]) -> list[str]:
    """Each kind of failure once, with how often it came."""
    counts = Counter(f"{each.arm}: {each.status or 'no answer'}: {each.fault}" for each in heard if each.fault)
    return [f"{fault} ({count} times)" if count > 1 else fault for fault, count in counts.most_common(8)]


def _figures(heard: Sequence[Heard], seconds: float) -> ServerFigures:
    fine = [each for each in heard if each.fault is None]
    tokens = sum(each.tokens for each in fine)
    steps = [each.steps for each in fine if each.steps is not None]
    # the first token of a text comes from reading its prompt
    after_first = sum(each.tokens - 1 for each in fine if each.steps is not None and each.tokens)
    return ServerFigures(
        requests=len(heard),
        failed=dict(Counter(str(each.status) for each in heard if each.fault)),
        duration=seconds,
        request_throughput=len(fine) / seconds,
        output_throughput=tokens / seconds,
        total_output_tokens=tokens,
        tokens_per_step=after_first / sum(steps) if sum(steps) else None,
        ttft_ms=_percentiles([each.first_s for each in fine if each.first_s is not None]),
        itl_ms=_percentiles([gap for each in fine for gap in each.gaps_s]),
        e2e_ms=_percentiles([each.whole_s for each in fine]),
    )


def _percentiles(seconds: Sequence[float]) -> Percentiles:
    found = {name: percentile(seconds, share) for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}
    return Percentiles(**{name: None if value is None else 1000 * value for name, value in found.items()})


def _agreement(heard: Sequence[Heard], ours: str, other: str) -> Agreement:
    texts = {
        name: {each.id: each.text for each in heard if each.arm == name and each.fault is None}
        for name in (ours, other)
    }
    both = [name for name in texts[ours] if name in texts[other]]
    differ = [name for name in both if texts[ours][name] != texts[other][name]]
    return Agreement(same=len(both) - len(differ), of=len(both), differ=differ)


def verdict_of(levels: Sequence[Level], ours: str) -> str:
    """A sentence for each other arm, and one on what failed."""
    said = []
    for name in levels[0].speedup:
        ratios = [ratio for level in levels if (ratio := level.speedup[name])]
        same, of = (sum(getattr(level.identical[name], part) for level in levels) for part in ("same", "of"))
        fast = (
            f"{min(ratios):.2f}x to {max(ratios):.2f}x" if len(ratios) > 1 else f"{ratios[0]:.2f}x" if ratios else "?"
        )
        said.append(f"{ours} writes {fast} the tokens of {name}; {same} of {of} texts are the same.")
    failed = sum(sum(arm.failed.values()) for level in levels for arm in level.arms.values())
    if failed:
        said.append(f"{failed} requests have no whole answer.")
    return " ".join(said) or f"{ours} answered every request."


def server_table(report: ServerReport) -> Table:
    """One row for each load and arm."""
    headers = (
        "clients",
        "arm",
        "tokens/s",
        f"{report.ours} is",
        "a step",
        "ttft p50",
        "p99",
        "between",
        "e2e p50",
        "p99 e2e",
        "failed",
        "same",
    )
    rows = [
        [
            level_name(level),
            name,
            f"{arm.output_throughput:.1f}",
            _ratio(level.speedup.get(name)),
            "-" if arm.tokens_per_step is None else f"{arm.tokens_per_step:.2f}",
            _ms(arm.ttft_ms.p50),
            _ms(arm.ttft_ms.p99),
            _ms(arm.itl_ms.p50),
            _ms(arm.e2e_ms.p50),
            _ms(arm.e2e_ms.p99),
            str(sum(arm.failed.values())),
            f"{level.identical[name].same} of {level.identical[name].of}" if name in level.identical else "-",
        ]
        for level in report.levels
        for name, arm in level.arms.items()
    ]
    legend = (
        "clients: requests at once, or requests a second. ttft: milliseconds to the first words; between: between the "
        "events of a text; e2e: to its end. same: texts that are those of the first arm."
    )
    return Table(headers, rows, spare=("p99 e2e", "between", "p99", "e2e p50", "failed"), legend=legend)


def level_name(level: Level) -> str:
    """As a table and a picture show it."""
    return Load(level.concurrency, level.request_rate).name


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
