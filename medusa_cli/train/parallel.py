"""Processes that learn side by side, each from its share of every step's batch. Knows no files and no model.

One leads: it decides which step comes next, and alone evaluates, saves and tells. The others follow it. Gradients are
summed, each weighted by what the whole step asks, so any number of processes learns what one would, up to rounding.
One process alone is a group too, for which nothing here does anything.
"""

import contextlib
import signal
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, distributed
from torch.distributed.rendezvous import rendezvous

from medusa_cli.config.recipe import TargetSettings
from medusa_cli.errors import MedusaError, TrainingError
from medusa_cli.train.loss import Scores, combine
from medusa_cli.util.process_rank import Place

JOIN_SECONDS = 300
# the others wait while the leader writes text, which may take days; who is gone is noticed at once, not by waiting
_PATIENCE = timedelta(days=365)
_OVER, _FAULT = -1, "medusa/fault"
_GO_ON = "all that is finished is kept: the same command with --resume-from-checkpoint goes on"


class Group(Protocol):
    """The processes that learn together, as one of them sees it."""

    def share(self, count: int) -> slice:
        """Which of a step's `count` examples are this process's: nearly equal runs of neighbours, maybe none."""

    def announce(self, step: int | None) -> None:
        """The leader: step number `step` begins, or, with None, there are no more."""

    def whole(self, scores: Scores, count: int, head_decay: float) -> Scores:
        """The scores of a step's `count` examples, in their order, from each process's of its share."""

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Put the sum over all processes in each parameter's `grad`."""


class Alone:
    """One process."""

    def share(self, count: int) -> slice:
        """All of them."""
        return slice(0, count)

    def announce(self, step: int | None) -> None:
        """Nobody listens."""

    def whole(self, scores: Scores, count: int, head_decay: float) -> Scores:
        """They are whole."""
        return scores

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """They are the sum."""


ALONE = Alone()


class Processes:
    """This process among those a launcher started, joined: gloo between CPUs, NCCL for gradients on GPUs.

    Every call waits for the others, and raises TrainingError when one of them is gone, with what it said last.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self._lost_one = False
        if not distributed.is_available():
            raise TrainingError("this build of torch knows no processes side by side", "train in one process")
        try:
            store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=JOIN_SECONDS)))
            self._store = store
            distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
                store=store,
                rank=place.rank,
                world_size=place.size,
                timeout=_PATIENCE,
            )
        except (RuntimeError, ValueError) as error:  # no such address, nobody there, a port that is taken
            raise TrainingError(
                f"process {place.rank} of {place.size} can't join the others: {' '.join(str(error).split())[:200]}",
                "all are to be launched with one address and one number of processes",
            ) from error

    def share(self, count: int) -> slice:
        """As `Group`."""
        rank, size = self.place.rank, self.place.size
        return slice(count * rank // size, count * (rank + 1) // size)

    def announce(self, step: int | None) -> None:
        """As `Group`."""
        assert self.place.leads
        self._say(_OVER if step is None else step)

    def announced(self) -> Iterator[int]:
        """A follower: the steps as they begin, until there are no more."""
        while (step := self._say(0)) != _OVER:
            yield step

    def whole(self, scores: Scores, count: int, head_decay: float) -> Scores:
        """As `Group`, on the CPU: a few numbers, and every process sees here that all are still there."""
        pair_loss_BK = torch.zeros(count, scores.pair_loss_BK.shape[1])
        pair_loss_BK[self.share(count)] = scores.pair_loss_BK.cpu()
        counts_2K = torch.stack([scores.right_K, scores.count_K]).cpu()
        with self._together():
            distributed.all_reduce(pair_loss_BK)
            distributed.all_reduce(counts_2K)
        device = scores.pair_loss_BK.device
        right_K, count_K = counts_2K.to(device)
        every = replace(scores, pair_loss_BK=pair_loss_BK.to(device), right_K=right_K, count_K=count_K)
        return combine([every], head_decay)

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """As `Group`."""
        with self._together():
            for parameter in parameters:
                if parameter.grad is None:  # nothing in this share asked for it
                    parameter.grad = torch.zeros_like(parameter)
                distributed.all_reduce(parameter.grad)

    def hand_out(self, thing: Any = None) -> Any:
        """The leader's `thing`, on every process."""
        box = [thing]
        with self._together():
            distributed.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def spread(self, tensor: Tensor) -> None:
        """Fill `tensor`, of one shape on every process, with the leader's numbers."""
        with self._together():
            distributed.broadcast(tensor.detach(), src=0)

    @contextlib.contextmanager
    def joined(self) -> Iterator["Processes"]:
        """Until all have left. A follower's error becomes the leader's, who alone speaks; a launcher's SIGTERM, by
        which it ends everyone when one is gone, ends the leader with an error too.
        """
        before = signal.signal(signal.SIGTERM, self._on_end) if self.place.leads else None
        try:
            yield self
        except BaseException as error:
            if not self.place.leads:
                self._leave_word(error)
            raise
        finally:
            if before is not None:
                signal.signal(signal.SIGTERM, before)
        distributed.destroy_process_group()

    def _say(self, number: int) -> int:
        """The leader's number, on every process."""
        word = torch.tensor(number)
        with self._together():
            distributed.broadcast(word, src=0)
        return int(word)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Turns what the library raises when a process is gone into a TrainingError."""
        try:
            yield
        except RuntimeError as error:
            if self.place.leads:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # this process ends by itself, after it has spoken
            raise self._lost(f"one of the {self.place.size} training processes has ended") from error

    def _on_end(self, *_: int | FrameType | None) -> None:
        """The launcher ends the leader."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise self._lost("the launcher ended all training processes (SIGTERM)")

    def _lost(self, otherwise: str) -> TrainingError:
        """Why this process can't go on, in the words of the one that failed if it had any."""
        self._lost_one = True
        with contextlib.suppress(RuntimeError):  # the store may be gone as well
            if self._store.check([_FAULT]):
                return TrainingError(self._store.get(_FAULT).decode(), _GO_ON)
        return TrainingError(otherwise, _GO_ON)

    def _leave_word(self, error: BaseException) -> None:
        """A follower: tell the leader, who may be waiting, what happened here; not that it noticed another's end."""
        if self._lost_one:
            return
        text = error.message if isinstance(error, MedusaError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError):
            if not self._store.check([_FAULT]):
                self._store.set(_FAULT, f"training process {self.place.rank} of {self.place.size} ended: {text}")


def device_of(settings: TargetSettings, place: Place) -> str:
    """The device of the recipe, or, where several processes share a machine with GPUs, this process's own GPU.

    Raises TrainingError when there are fewer GPUs than processes, or one is named for all of them.
    """
    if place.local_size == 1 or settings.device in ("cpu", "mps") or not torch.cuda.is_available():
        return settings.device
    present = torch.cuda.device_count()
    if settings.device not in ("auto", "cuda"):
        raise TrainingError(
            f"--device {settings.device} is one GPU for {place.local_size} processes",
            "leave it out: each process takes a GPU of its own",
        )
    if place.local_size > present:
        raise TrainingError(
            f"{place.local_size} processes on this machine can't have a GPU each: torch sees {present}",
            f"launch {present}, or train with --device cpu",
        )
    return f"cuda:{place.local_rank}"


def group_at(place: Place) -> "contextlib.AbstractContextManager[Processes | Alone]":
    """The group that this place is in, for as long as it lasts."""
    return Processes(place).joined() if place.size > 1 else contextlib.nullcontext(ALONE)
