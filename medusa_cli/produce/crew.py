"""Processes that decode side by side, so that small matrices keep every core busy. Knows no files.

One process holds one copy of the model. With one worker everything runs in this process.
"""

import multiprocessing
import os
import queue
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.acceptance.lossless import Lossless
from medusa_cli.contracts import AcceptanceRule
from medusa_cli.data.distill import Written
from medusa_cli.decode.loop import Gain, Parts, decode
from medusa_cli.decode.rows import Limits
from medusa_cli.drafters.none import NoDrafter
from medusa_cli.errors import TrainingError
from medusa_cli.recipe import Recipe
from medusa_cli.target.load import load_target
from medusa_cli.target.model import Target

JOIN_SHARE = 8  # a prompt is read when an eighth of the rows is free: read together they cost less


@dataclass(frozen=True)
class Manner:
    """How texts are to be written. temperature 0 is greedy."""

    max_new_tokens: int
    temperature: float
    top_p: float
    rows: int
    seed: int
    want_hidden: bool


def write_here(target: Target, prompts: Iterable[Sequence[int]], manner: Manner) -> Iterator[Written]:
    """A text for every prompt, in the order they finish, written in this process."""
    rule: AcceptanceRule = Lossless(manner.temperature, manner.top_p, top_k=0) if manner.temperature > 0 else Greedy()
    rng = torch.Generator(target.device).manual_seed(manner.seed)
    parts = Parts(target, NoDrafter(), rule, rng)
    limits = Limits(manner.max_new_tokens, target.stop_ids, target.context_limit)
    seen: dict[int, list[torch.Tensor]] = {}
    for gain in decode(parts, prompts, limits, manner.rows, join_at=max(1, manner.rows // JOIN_SHARE)):
        if manner.want_hidden:
            seen.setdefault(gain.row.key, []).append(gain.hidden_TH.to("cpu", torch.float16))
        if gain.row.finish_reason is not None:
            yield _written(gain, seen.pop(gain.row.key, []))


def write_beside(recipe: Recipe, prompts: Sequence[Sequence[int]], manner: Manner, workers: int) -> Iterator[Written]:
    """The same by `workers` processes that take prompts from one queue; each loads the recipe's target.

    Raises TrainingError when a process dies. Closing the iterator ends them.
    """
    context = multiprocessing.get_context("spawn")
    jobs, results = context.Queue(), context.Queue()
    for job in [*enumerate(prompts), *[None] * workers]:
        jobs.put(job)
    crew = [
        context.Process(target=_work, args=(recipe, manner, index, workers, jobs, results), daemon=True)
        for index in range(workers)
    ]
    for process in crew:
        process.start()
    try:
        yield from _results(crew, results, len(prompts))
    finally:
        for process in crew:
            process.terminate()
            process.join()


def _results(crew: Sequence[Any], results: Any, wanted: int) -> Iterator[Written]:
    """As many results as wanted, or TrainingError when nobody is left to bring them."""
    for _ in range(wanted):
        while True:
            try:
                found = results.get(timeout=5)
                break
            except queue.Empty:
                dead = [process for process in crew if process.exitcode not in (None, 0)]
                if dead:
                    raise TrainingError(
                        f"a writing process ended with code {dead[0].exitcode}",
                        "run the same command again: what was written is kept; fewer data.rows need less memory",
                    ) from None
        yield Written(found.index, found.token_ids, found.finish_reason, torch.from_numpy(found.hidden_TH))


def _work(recipe: Recipe, manner: Manner, index: int, workers: int, jobs: Any, results: Any) -> None:
    """One process: take jobs until None comes, hand back finished texts as plain arrays."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    target = load_target(recipe.target)
    taken: list[int] = []

    def prompts() -> Iterator[Sequence[int]]:
        for job, ids in iter(jobs.get, None):
            taken.append(job)
            yield ids

    own = Manner(**{**vars(manner), "seed": manner.seed + index})
    for written in write_here(target, prompts(), own):
        # Tensors would travel as shared memory handles, one file each: plain arrays don't.
        array: Any = written.hidden_TH.numpy()
        results.put(Written(taken[written.index], written.token_ids, written.finish_reason, array))


def _written(gain: Gain, seen: Sequence[torch.Tensor]) -> Written:
    """A finished row's text, with the hidden states that decided it (none when they weren't wanted)."""
    tokens = gain.row.new_tokens
    hidden_TH = torch.cat(list(seen))[: len(tokens)] if seen else torch.empty(0, 0, dtype=torch.float16)
    return Written(gain.row.key, tokens, gain.row.finish_reason or "", hidden_TH)
