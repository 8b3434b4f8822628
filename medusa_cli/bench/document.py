"""The report of a bench as one typed document: what `medusa bench` prints and keeps, and what is read back.

Names are vLLM's where vLLM has one. This file knows no model and prints nothing.
"""

from typing import Annotated, Any

from pydantic import BaseModel, Field, model_validator

from medusa_cli.bench.compare import Divergence, Same

# what can be counted and shown: a file may hold any number
Count = Annotated[int, Field(ge=0, le=2**53)]
Figure = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]


class Category(BaseModel):
    """What an arm did in one category."""

    output_throughput: Figure | None
    tokens_per_step: Figure | None


class Answer(BaseModel):
    """What an arm wrote for one prompt."""

    id: str
    category: str
    token_ids: list[Count]
    finish_reason: str
    num_steps: Count
    duration: Figure


class Latency(BaseModel):
    """Milliseconds a token of each reply: percentiles over replies."""

    p50: Figure | None
    p90: Figure | None
    p99: Figure | None


class TimeSplit(BaseModel):
    """Seconds of each part of a step; None where they weren't measured."""

    prefill: Figure | None = None
    draft: Figure | None
    verify: Figure | None
    accept: Figure | None
    keep: Figure | None
    other: Figure | None


class ArmFigures(BaseModel):
    """What an arm did in all; sums run over all its trials, repeats included.

    dtype, runner                  what it ran in; None in files from before they were kept
    step_throughput                tokens a second of the steps alone, without the prefill and the token it decides;
                                   None where parts weren't timed
    tokens_per_step                tokens gained per step after the prefill, the bonus token counted
    spec_decode_num_drafts         steps that checked at least one guess
    spec_decode_draft_tokens       guesses checked: the nodes of all trees, roots left out
    spec_decode_accepted_tokens    guesses kept, bonus tokens left out
    spec_decode_acceptance_rate    accepted / draft tokens: in a tree siblings compete, so it is below 1 by design
    spec_decode_acceptance_length  1 + accepted / drafts, as in vLLM: the bonus token counted
    spec_decode_per_position_acceptance_rates   for each depth, the share of drafts that kept a guess that deep
    latency_ms                     milliseconds a token of each reply, prefill included; percentiles over replies
    """

    dtype: str | None = None
    runner: str | None = None

    output_throughput: Figure | None
    step_throughput: Figure | None = None
    duration: Figure
    total_output_tokens: Count
    num_steps: Count
    tokens_per_step: Figure | None
    spec_decode_acceptance_rate: Figure | None
    spec_decode_acceptance_length: Figure | None
    spec_decode_num_drafts: Count
    spec_decode_draft_tokens: Count
    spec_decode_accepted_tokens: Count
    spec_decode_per_position_acceptance_rates: list[Figure]
    latency_ms: Latency
    time_split: TimeSplit
    categories: dict[str, Category]
    results: list[Answer]


class Contention(BaseModel):
    """What others took of the processor meanwhile (`util.busy.Contention`)."""

    waiting: float | None
    stolen: float | None
    load_average: float | None
    cores: Count
    busy: bool


class Run(BaseModel):
    """Where a result comes from, and what was asked."""

    date: str
    machine: str
    versions: dict[str, str]
    command: str
    prompts: str
    num_prompts: Count
    max_new_tokens: Count
    batch_size: Count
    repeats: Count
    contention: Contention | None = None


class Report(BaseModel):
    """One document of `medusa bench`, as it is written and as it is read.

    ours             the arm that the others are compared with; in files from before it was kept, the first
    speedup          how many times as many tokens a second it writes as the arm; None without a time
    speedup_spread   the least and the most of it over the repeats, or over thirds of the prompts for one repeat

    Arms that ran in several dtypes are named `hf-greedy@float32`, `hf-greedy@bfloat16`; the plain name `hf-greedy`
    then stands for the faster one, and under `identical` for the one in the subject's dtype, if it ran.
    """

    model: str
    dtype: str
    device: str
    runner: str
    threads: Count
    ours: str = ""
    arms: dict[str, ArmFigures] = Field(min_length=1)
    speedup: dict[str, Figure | None]
    speedup_spread: dict[str, tuple[Figure, Figure] | None]
    identical: dict[str, Same]
    divergences: list[Divergence]
    verdict: str
    run: Run

    @model_validator(mode="after")
    def _is_whole(self) -> "Report":
        self.ours = self.ours or next(iter(self.arms))
        if self.ours not in self.arms:
            raise ValueError(f"ours is {self.ours}, which is no arm")
        compared = self.speedup.keys() & self.speedup_spread.keys() & self.identical.keys()
        missing = [name for name in self.others if name not in compared]
        if missing:
            raise ValueError(f"{missing[0]} is compared with nothing")
        asked = set(self.arms[self.ours].categories)
        lacking = [name for name, arm in self.arms.items() if set(arm.categories) != asked]
        if lacking:
            raise ValueError(f"{lacking[0]} was asked in other categories")
        return self

    @property
    def ran(self) -> list[str]:
        """Arms that ran: the plain name that stands for the faster of several dtypes is left out."""
        return [name for name in self.arms if not any(other.startswith(f"{name}@") for other in self.arms)]

    @property
    def others(self) -> list[str]:
        """Arms that ran and are compared with."""
        return [name for name in self.ran if name != self.ours]

    def document(self) -> dict[str, Any]:
        """The JSON of it."""
        return self.model_dump(mode="json")
