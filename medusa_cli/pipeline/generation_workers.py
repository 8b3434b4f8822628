"""Processes that decode side by side, so that small matrices keep every core busy. Knows no files.

One process holds one copy of the model. With one worker everything runs in this process.
"""

import multiprocessing
import signal
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.acceptance.lossless import Lossless
from medusa_cli.config.recipe import Recipe
from medusa_cli.contracts import AcceptanceRule
from medusa_cli.data.distill import Written
from medusa_cli.decode.engine import Gain
from medusa_cli.decode.loop import Parts, decode
from medusa_cli.decode.rows import Limits
from medusa_cli.drafters.none import NoDrafter
from medusa_cli.errors import MedusaError, TrainingError
from medusa_cli.model.loading.load import load_target
from medusa_cli.model.target import Target
from medusa_cli.pipeline.inner_states import StateRecorder
from medusa_cli.util.threads import threads_to_share

JOIN_SHARE = 8  # a prompt is read when an eighth of the rows is free: read together they cost less


@dataclass(frozen=True)
class Manner:
    """How texts are to be written. temperature 0 is greedy; max_tokens bounds prompt and text together.

    taps   inner layers whose states are wanted of prompt and text
    """

    max_new_tokens: int
    max_tokens: int | None
    rows: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    want_hidden: bool = False
    taps: tuple[int, ...] = ()


@dataclass(frozen=True)
class Job:
    """A prompt to go on from. Its number and the manner's seed give the random numbers it is sampled with."""

    number: int
    ids: Sequence[int]


def write_here(target: Target, jobs: Iterable[Job], manner: Manner) -> Generator[Written, None, None]:
    """A text for every prompt, in the order they finish, written in this process."""
    rule: AcceptanceRule = Lossless(manner.temperature, manner.top_p, top_k=0) if manner.temperature > 0 else Greedy()
    numbers: list[int] = []

    def prompts() -> Iterator[Sequence[int]]:
        for job in jobs:
            numbers.append(job.number)
            yield job.ids

    recorder = StateRecorder(manner.taps) if manner.taps else None
    parts = Parts(target, recorder or NoDrafter(), rule, seed=manner.seed, number_of=numbers.__getitem__)
    limits = Limits(manner.max_new_tokens, target.stop_ids, manner.max_tokens)
    seen: dict[int, list[torch.Tensor]] = {}
    try:
        for gain in decode(parts, prompts(), limits, manner.rows, join_at=max(1, manner.rows // JOIN_SHARE)):
            if manner.want_hidden:
                seen.setdefault(gain.row.key, []).append(gain.hidden_TH.to("cpu", torch.float16))
            if gain.row.finish_reason is not None:
                written = _written(gain, seen.pop(gain.row.key, []))
                yield written if recorder is None else replace(written, taps_TX=recorder.take(gain.row.tokens))
    finally:
        target.release()  # what comes next has other uses for this memory than so many rows


def write_beside(recipe: Recipe, jobs: Sequence[Job], manner: Manner, workers: int) -> Generator[Written, None, None]:
    """The same by `workers` processes that ask for a prompt when they have room; each loads the recipe's target.

    Raises TrainingError when a process fails or dies. Closing the iterator ends them, and so does the end of this
    process, however it comes.
    """
    crew: dict[Connection, Any] = {}
    try:
        with _deaf_to_interrupts():
            for _ in range(workers):
                link, process = _hire(recipe, manner, workers)
                crew[link] = process
        yield from _serve(dict(crew), jobs)
    finally:
        for link, process in crew.items():
            process.terminate()
            process.join()
            link.close()


@dataclass(frozen=True)
class _Failure:
    """What a process could not do, in words."""

    message: str
    hint: str


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Processes started inside ignore Ctrl-C, which a terminal sends to all: this one alone ends them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _hire(recipe: Recipe, manner: Manner, workers: int) -> tuple[Connection, Any]:
    """A started process and this side of the pipe to it.

    Each has a pipe of its own, whose far end is closed here: it reads as ended when the process is gone, even in the
    middle of a message. A queue shared by all would be left locked.
    """
    # The server imports torch once, for every process of this crew and the next.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    link, far = context.Pipe()
    process = context.Process(target=_work, args=(recipe, manner, workers, far), daemon=True)
    process.start()
    far.close()
    return link, process


def _serve(crew: dict[Connection, Any], jobs: Sequence[Job]) -> Iterator[Written]:
    """Hand out prompts to those who ask, and hand on finished texts, until every process has ended by itself."""
    waiting = iter(enumerate(jobs))
    while crew:
        for link in wait(list(crew)):
            assert isinstance(link, Connection)
            try:
                message = link.recv()
                if message is None:
                    link.send(next(waiting, None))
            except (EOFError, OSError):
                _check_end(crew.pop(link))
                continue
            if isinstance(message, _Failure):
                raise TrainingError(message.message, message.hint)
            if message is not None:
                taps = None if message.taps_TX is None else torch.from_numpy(message.taps_TX)
                yield replace(message, hidden_TH=torch.from_numpy(message.hidden_TH), taps_TX=taps)


def _check_end(process: Any) -> None:
    """Raise TrainingError unless this process, whose pipe has ended, left in order."""
    process.join()
    if process.exitcode != 0:
        raise TrainingError(
            f"a writing process ended with code {process.exitcode}",
            "run the same command again: what was written is kept; fewer data.rows need less memory",
        )


def _work(recipe: Recipe, manner: Manner, workers: int, link: Connection) -> None:
    """One process: ask for prompts until None comes, hand back finished texts as plain arrays."""
    torch.set_num_threads(max(1, threads_to_share() // workers))
    taken: list[int] = []

    def jobs() -> Iterator[Job]:
        while True:
            link.send(None)
            handed = link.recv()
            if handed is None:
                return
            taken.append(handed[0])
            yield handed[1]

    try:
        for written in write_here(load_target(recipe.target), jobs(), manner):
            # Tensors would travel as shared memory handles, one file each: plain arrays don't.
            array: Any = written.hidden_TH.numpy()
            taps: Any = None if written.taps_TX is None else written.taps_TX.numpy()
            link.send(replace(written, index=taken[written.index], hidden_TH=array, taps_TX=taps))
    except MedusaError as error:
        link.send(_Failure(error.message, error.hint))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the process that wanted the texts is gone


def _written(gain: Gain, seen: Sequence[torch.Tensor]) -> Written:
    """A finished row's text, with the hidden states that decided it (none when they weren't wanted)."""
    tokens = gain.row.new_tokens
    hidden_TH = torch.cat(list(seen))[: len(tokens)] if seen else torch.empty(0, 0, dtype=torch.float16)
    return Written(gain.row.key, tokens, gain.row.finish_reason or "", hidden_TH)
