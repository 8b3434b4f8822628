"""The figures of a bench: from trials to its report, and from that to a table of text.

Every figure is a sum over all trials divided by a sum over all trials, never a mean of ratios. This file knows no
model and prints nothing.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from medusa_cli.bench.baselines import PARTS
from medusa_cli.bench.compare import AS_STORED, LLAMA_CPP, Comparison, dtype_of
from medusa_cli.bench.document import Answer, ArmFigures, Category, Latency, Report, Run, TimeSplit
from medusa_cli.bench.run import Trial
from medusa_cli.bench.verdict import verdict_in_words
from medusa_cli.util.markdown import table_of

_SHARES = 3
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class Setup:
    """What was measured, and on what. dtype and runner are the subject's."""

    model: str
    dtype: str
    device: str
    runner: str
    threads: int


@dataclass(frozen=True)
class Table:
    """A table as text: the console decides how it looks.

    spare    headers of columns that a narrow screen does without, those to go first first
    legend   what headers mean that aren't plain
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    spare: Sequence[str] = ()
    legend: str = ""


def build_report(
    setup: Setup, trials: Sequence[Trial], subject: str, comparison: Comparison, notes: Sequence[str], run: Run
) -> Report:
    """The document that `medusa bench --json` prints. `notes`: sentences for the reader, at the end of the verdict."""
    by_arm = _grouped(trials, lambda trial: trial.arm)
    others = [name for name in by_arm if name != subject]
    ours = by_arm.get(subject, [])
    report = Report(
        **asdict(setup),
        ours=subject,
        arms={name: arm_figures(mine, setup) for name, mine in by_arm.items()},
        speedup={name: _ratio(_throughput(ours), _throughput(by_arm[name])) for name in others},
        speedup_spread={name: _spread(ours, by_arm[name]) for name in others},
        identical=dict(comparison.identical),
        divergences=list(comparison.divergences),
        verdict="",
        run=run,
    )
    _name_the_better(report)
    report.verdict = " ".join([verdict_in_words(report), *notes])
    return report


def arm_figures(trials: Sequence[Trial], setup: Setup) -> ArmFigures:
    """One arm's entry, from all its trials."""
    duration, tokens = sum(trial.share for trial in trials), _num_tokens(trials)
    guesses = [
        (kept - 1 if kept else 0, nodes - 1)
        for trial in trials
        for kept, nodes in zip(trial.reply.kept, trial.reply.num_nodes, strict=True)
        if nodes > 1
    ]
    accepted, offered = sum(kept for kept, _ in guesses), sum(nodes for _, nodes in guesses)
    depth = max((trial.reply.draft_depth for trial in trials), default=0)
    per_token = [1000 * trial.duration / len(trial.reply.token_ids) for trial in trials if trial.reply.token_ids]
    length = _ratio(accepted, len(guesses))
    name = trials[0].arm
    split = _time_split(trials, duration)
    return ArmFigures(
        dtype=dtype_of(name, setup.dtype),
        runner=_runner_of(name, setup),
        output_throughput=_ratio(tokens, duration),
        step_throughput=_in_steps(trials, duration, split.prefill),
        duration=duration,
        total_output_tokens=tokens,
        num_steps=_num_steps(trials),
        tokens_per_step=_tokens_per_step(trials),
        spec_decode_acceptance_rate=_ratio(accepted, offered),
        spec_decode_acceptance_length=None if length is None else 1 + length,
        spec_decode_num_drafts=len(guesses),
        spec_decode_draft_tokens=offered,
        spec_decode_accepted_tokens=accepted,
        spec_decode_per_position_acceptance_rates=[
            sum(kept >= place for kept, _ in guesses) / len(guesses) for place in range(1, depth + 1) if guesses
        ],
        latency_ms=Latency(**{name: percentile(per_token, share) for name, share in _PERCENTILES.items()}),
        time_split=split,
        categories={
            category: Category(output_throughput=_throughput(mine), tokens_per_step=_tokens_per_step(mine))
            for category, mine in _grouped(trials, lambda trial: trial.prompt.category).items()
        },
        results=[_result(mine) for mine in _grouped(trials, lambda trial: trial.prompt.id).values()],
    )


def _runner_of(name: str, setup: Setup) -> str:
    """Which forwards an arm ran on: transformers' own layers are eager, llama.cpp has forwards of its own."""
    if name == LLAMA_CPP:
        return LLAMA_CPP
    return "eager" if name.startswith("hf-") else setup.runner


_PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def percentile(values: Iterable[float], share: float) -> float | None:
    """The value below which `share` of the values lie, between neighbours by proportion; None for no values."""
    order = sorted(values)
    if not order:
        return None
    place = share * (len(order) - 1)
    low = int(place)
    high = min(low + 1, len(order) - 1)
    return order[low] + (order[high] - order[low]) * (place - low)


def table(report: Report) -> Table:
    """One row per arm that ran, in the order of the report, and how the first of them does beside it."""
    subject = report.ours
    headers = (
        "arm", "tokens/s", f"{subject} is", "in steps", "a step", "kept", "ms p50", "p90", "p99", "same",
    )  # fmt: skip
    return Table(
        headers,
        [_row(report, name) for name in report.ran],
        spare=("p90", "p99", "ms p50", "kept", "in steps"),
        legend=f"in brackets: the least and the most over {_parts_in_words(report)}; in steps: tokens/s without "
        "reading prompts; a step: tokens gained, the bonus token included; kept: guesses kept a step; ms: milliseconds "
        f"a token, reading included; same: replies like those of {subject}.",
    )


def _parts_in_words(report: Report) -> str:
    """What a spread is taken over."""
    return "repeats" if report.run.repeats > 1 else "thirds of the prompts"


def as_fast(ratio: float | None, spread: Sequence[float] | None) -> str:
    """1.25x as fast (1.19 to 1.41); a dash without a time."""
    if ratio is None:
        return "-"
    return f"{ratio:.2f}x as fast" + (f" ({spread[0]:.2f} to {spread[1]:.2f})" if spread else "")


def _row(report: Report, name: str) -> list[str]:
    """One arm's cells."""
    arm, spread = report.arms[name], report.speedup_spread.get(name)
    same = report.identical.get(name)
    per_draft = _ratio(arm.spec_decode_accepted_tokens, arm.spec_decode_num_drafts)
    return [
        f"{name} ({AS_STORED})" if dtype_of(name, report.dtype) == AS_STORED else name,
        _cell(arm.output_throughput, "{:.1f}"),
        as_fast(report.speedup.get(name), spread),
        _cell(arm.step_throughput, "{:.1f}"),
        _cell(arm.tokens_per_step, "{:.2f}"),
        _cell(per_draft, "{:.2f}"),
        *(_cell(value, "{:.1f}") for value in arm.latency_ms.model_dump().values()),
        f"{same.same} of {same.of}" if same else "-",
    ]


def _cell(value: float | None, form: str) -> str:
    """A figure, or a dash for one that can't be had."""
    return "-" if value is None else form.format(value)


def _name_the_better(report: Report) -> None:
    """Give the plain name of an arm that ran in several dtypes to the better of them, in every mapping by arm."""
    for name in {name.partition("@")[0] for name in report.arms if "@" in name} - set(report.arms):
        variants = [arm for arm in report.arms if arm.startswith(f"{name}@")]
        best = max(variants, key=lambda arm: report.arms[arm].output_throughput or 0.0)
        report.arms[name] = report.arms[best]
        report.speedup[name] = report.speedup[best]
        report.speedup_spread[name] = report.speedup_spread[best]
        alike = [arm for arm in variants if report.arms[arm].dtype == report.dtype]
        twin = (alike or [best])[0]
        if twin in report.identical:
            report.identical[name] = report.identical[twin]


def _spread(ours: Sequence[Trial], theirs: Sequence[Trial]) -> tuple[float, float] | None:
    """(least, most) speed-up over the repeats; every third prompt makes a share when there is one repeat."""
    place = {name: n % _SHARES for n, name in enumerate(dict.fromkeys(trial.prompt.id for trial in ours))}
    repeated = any(trial.repeat for trial in ours)

    def part(trial: Trial) -> int:
        return trial.repeat if repeated else place[trial.prompt.id]

    mine, other = _grouped(ours, part), _grouped(theirs, part)
    ratios = [_ratio(_throughput(mine[key]), _throughput(other[key])) for key in mine]
    known = [ratio for ratio in ratios if ratio is not None]
    return (min(known), max(known)) if known else None


def _time_split(trials: Sequence[Trial], duration: float) -> TimeSplit:
    """Seconds per part; None for parts that weren't measured. What no part accounts for is `other`."""
    split: dict[str, float | None] = {
        part: sum(trial.reply.time_split[part] for trial in trials if part in trial.reply.time_split)
        if any(part in trial.reply.time_split for trial in trials)
        else None
        for part in PARTS
    }
    known = [seconds for part, seconds in split.items() if part != "other" and seconds is not None]
    split["other"] = max(0.0, duration - sum(known)) if known else None
    return TimeSplit(**split)


def _in_steps(trials: Sequence[Trial], duration: float, prefill: float | None) -> float | None:
    """Tokens a second that steps gained, over the time that prompts weren't read in."""
    gained = sum(sum(trial.reply.kept) for trial in trials)
    return None if prefill is None else _ratio(gained, max(0.0, duration - prefill))


def _result(trials: Sequence[Trial]) -> Answer:
    """One prompt: the first repeat's reply, and the mean duration over the repeats."""
    first = trials[0]
    return Answer(
        id=first.prompt.id,
        category=first.prompt.category,
        token_ids=list(first.reply.token_ids),
        finish_reason=first.reply.finish_reason,
        num_steps=first.reply.num_steps,
        duration=sum(trial.duration for trial in trials) / len(trials),
    )


def _grouped(trials: Sequence[Trial], key: Callable[[Trial], _Key]) -> dict[_Key, list[Trial]]:
    """Trials by key; the order of first sight."""
    groups: dict[_Key, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(key(trial), []).append(trial)
    return groups


def _num_tokens(trials: Sequence[Trial]) -> int:
    return sum(len(trial.reply.token_ids) for trial in trials)


def _num_steps(trials: Sequence[Trial]) -> int:
    return sum(trial.reply.num_steps for trial in trials)


def _throughput(trials: Sequence[Trial]) -> float | None:
    return _ratio(_num_tokens(trials), sum(trial.share for trial in trials))


def _tokens_per_step(trials: Sequence[Trial]) -> float | None:
    return _ratio(sum(sum(trial.reply.kept) for trial in trials), _num_steps(trials))


def _ratio(above: float | None, below: float | None) -> float | None:
    """A quotient, or None where it means nothing."""
    return above / below if above is not None and below else None


def markdown(table: Table) -> str:
    """The table as Markdown."""
    return table_of(table.headers, table.rows)
