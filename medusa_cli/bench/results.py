"""Report files of `medusa bench` read back, and those of one set-up merged into one column of figures.

Sums are merged, never ratios. This file knows no model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from medusa_cli.bench.compare import Divergence, Same
from medusa_cli.bench.document import Report
from medusa_cli.errors import FormatError
from medusa_cli.util.plain_json import parse_json

_HINT = "name files that medusa bench --output-json wrote, or folders of --output-dir"


def read_result(file: Path) -> Report:
    """The result in a file, or in a folder of `--output-dir`. Raises FormatError."""
    if file.is_dir():
        if not (file / "bench.json").exists() and (file / "run.json").exists():
            raise FormatError(f"the bench in {file} has not ended", "run its command again: it goes on")
        file = file / "bench.json"
    try:
        content: Any = parse_json(file.read_text(encoding="utf-8"))
        return Report.model_validate(content)
    except OSError as error:
        raise FormatError(f"can't read {file}: {error.strerror}", _HINT) from error
    except ValidationError as error:
        raise FormatError(f"{file} is no result of medusa bench: {first_fault(error)}", _HINT) from error
    except ValueError as error:
        raise FormatError(f"{file} is no JSON: {error}", _HINT) from error


def first_fault(error: ValidationError) -> str:
    """What is wrong first, and where."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" if place else first["msg"]


@dataclass(frozen=True)
class Column:
    """Reports of one set-up: parts of one measurement, each on prompts of its own."""

    parts: Sequence[Report]

    @property
    def first(self) -> Report:
        """The part that what all have alike is read off."""
        return self.parts[0]

    @property
    def subject(self) -> str:
        """The arm that the others are compared with."""
        return self.first.ours

    @cached_property
    def kinds(self) -> list[str]:
        """Arms compared with, those that ran in several dtypes by their plain name, once."""
        return list(dict.fromkeys(name.partition("@")[0] for name in self.first.others))

    def tokens_per_second(self, arm: str) -> float | None:
        """All tokens over all seconds."""
        ran = [part.arms[arm] for part in self.parts]
        return _ratio(sum(one.total_output_tokens for one in ran), sum(one.duration for one in ran))

    def fastest(self, kind: str) -> str:
        """The fastest arm of this name, over all parts."""
        named = [name for name in self.first.others if name.partition("@")[0] == kind]
        return max(named, key=lambda name: self.tokens_per_second(name) or 0.0)

    @property
    def tokens_per_step(self) -> float | None:
        """The subject's, the bonus token included."""
        ran = [part.arms[self.subject] for part in self.parts]
        gained = sum((one.tokens_per_step or 0.0) * one.num_steps for one in ran)
        return _ratio(gained, sum(one.num_steps for one in ran))

    def speedup(self, kind: str) -> float | None:
        """Of the subject over the fastest arm of this name: a ratio of totals."""
        return _ratio(self.tokens_per_second(self.subject), self.tokens_per_second(self.fastest(kind)))

    def spread(self, kind: str) -> tuple[float, float] | None:
        """Least and most of it: over the parts, or as the one part has it."""
        arm = self.fastest(kind)
        if len(self.parts) == 1:
            return self.first.speedup_spread.get(arm)
        known = [ratio for part in self.parts if (ratio := part.speedup.get(arm)) is not None]
        return (min(known), max(known)) if known else None

    def identical(self, arm: str) -> Same:
        """Replies that are the same as the subject's."""
        every = [part.identical[arm] for part in self.parts]
        return Same(same=sum(one.same for one in every), of=sum(one.of for one in every))

    def divergences(self, arm: str) -> list[Divergence]:
        """Where replies part from the subject's."""
        return [row for part in self.parts for row in part.divergences if row.arm == arm]

    @cached_property
    def prompts(self) -> dict[str, str]:
        """Category by id."""
        return {answer.id: answer.category for part in self.parts for answer in part.arms[self.subject].results}

    def category(self, arm: str, category: str) -> tuple[float | None, float | None]:
        """Tokens a second and tokens a step of an arm in one category."""
        tokens = seconds = gained = steps = 0.0
        for part in self.parts:
            figures = part.arms[arm].categories.get(category)
            answers = [answer for answer in part.arms[arm].results if answer.category == category]
            if not figures or not answers or not figures.output_throughput:
                continue
            written = sum(len(answer.token_ids) for answer in answers)
            taken = sum(answer.num_steps for answer in answers)
            tokens, seconds = tokens + written, seconds + written / figures.output_throughput
            gained, steps = gained + (figures.tokens_per_step or 0.0) * taken, steps + taken
        return _ratio(tokens, seconds), _ratio(gained, steps)


def columns(results: Sequence[tuple[Path, Report]]) -> list[Column]:
    """Reports by set-up, in their order. Raises FormatError for a prompt that two parts of one set-up have."""
    groups: dict[tuple[Any, ...], list[tuple[Path, Report]]] = {}
    for file, result in results:
        groups.setdefault(_setup(result), []).append((file, result))
    for parts in groups.values():
        seen: dict[str, Path] = {}
        for file, result in parts:
            for answer in result.arms[result.ours].results:
                if answer.id in seen:
                    raise FormatError(
                        f"the prompt {answer.id} is in {seen[answer.id]} and in {file}, which measure the same",
                        "name one of them; --repeats measures a prompt several times",
                    )
                seen[answer.id] = file
    return [Column([result for _, result in parts]) for parts in groups.values()]


def _setup(result: Report) -> tuple[Any, ...]:
    """What must be alike for two results to be parts of one measurement."""
    run = result.run
    asked = (run.max_new_tokens, run.batch_size, run.repeats)
    here = (run.machine, *sorted(run.versions.items()), result.device, result.threads)
    return (result.model, result.dtype, result.runner, *result.arms, *asked, *here)


def _ratio(above: float | None, below: float | None) -> float | None:
    """A quotient, or None where it means nothing."""
    return above / below if above is not None and below else None
