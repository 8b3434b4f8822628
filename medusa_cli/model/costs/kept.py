"""Costs of steps on this machine: kept between runs, corrected by what decoding sees, found without a model."""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import medusa_cli
from medusa_cli.util import remembered
from medusa_cli.util.busy import how_threads_wait
from medusa_cli.util.remembered import Fact

if TYPE_CHECKING:
    from medusa_cli.model.target import Target

KIND, CHOICES = "costs", "auto"
MOST_AGE = timedelta(days=30)  # machines, drivers and neighbours change: what was timed is timed again
_MOST_NODES = 10_000  # of a step; more were never measured
_CORRECTED = 0.5  # weight of what one run saw, in what is kept
_NAMES = {"medusa", "torch", "device", "machine", "threads", "waits", "fingerprint", "dtype"}
OFF = 2.0  # plain steps that take so many times what is kept, or so much less: that isn't this machine's any more
BESIDE_S = 0.005  # that a step may take beside its forward: guessing, accepting, showing text


@dataclass(frozen=True)
class Costs:
    """What a step of one row costs, of which weights, and how that was measured.

    seconds    least by nodes verified, the root included; the drafter's own time is not in them
    laps       seconds from one step to the next while texts were written, by nodes verified, as runs saw them: with
               all that a step takes beside its forward
    spread     by how much of the least the middle round took longer, at the size that was hit most
    disturbed  others had the processor meanwhile
    target     the name the model was asked for by
    machine    the processor or the GPU
    measured   when, as ISO 8601 with the time zone
    """

    seconds: dict[int, float]
    laps: dict[int, float]
    spread: float
    disturbed: bool
    target: str
    fingerprint: str
    runner: str
    attention: str
    dtype: str
    device: str
    machine: str
    threads: int
    measured: str

    def corrected(self, seen: Mapping[int, float]) -> "Costs":
        """With what another run saw, in equal parts with what runs before it did."""
        laps = dict(self.laps)
        for nodes, seconds in seen.items():
            before = laps.get(nodes, seconds)
            laps[nodes] = before + _CORRECTED * (seconds - before)
        return replace(self, laps=dict(sorted(laps.items())))

    def is_off(self, seen: Mapping[int, float]) -> bool:
        """Whether plain steps took so much more or less than this says that it must be measured again."""
        plain = seen.get(1)
        return plain is not None and not self.seconds[1] / OFF < plain < OFF * self.seconds[1] + BESIDE_S


@dataclass(frozen=True)
class Asked:
    """Whose costs are looked for. fingerprint None: by the target's name alone; device: its kind."""

    target: str
    fingerprint: str | None
    dtype: str
    device: str

    def means(self, key: remembered.Key, target: str) -> bool:
        """Whether a fact with this key is about this target, dtype and kind of device."""
        same = target == self.target if self.fingerprint is None else key["fingerprint"] == self.fingerprint
        kind = key["device"].partition(":")[0] == self.device.partition(":")[0]
        return same and kind and key["dtype"] == self.dtype


def setting_of(device: torch.device) -> dict[str, str]:
    """What any time depends on beside the model: versions, machine, threads, and how these wait."""
    return {
        "medusa": medusa_cli.__version__,
        "torch": torch.__version__,
        "device": str(device),
        "machine": machine_of(device),
        "threads": str(torch.get_num_threads()),
        "waits": how_threads_wait(os.environ),
    }


def key_of(target: "Target") -> dict[str, str]:
    """All that a step of this target depends on, as far as it can be told."""
    identity = target.identity
    return {
        **setting_of(target.device),
        "fingerprint": target.fingerprint,  # which kernels read the weights depends on their values
        "files": identity.files or "",  # a damaged copy has the fingerprint of a whole one
        "config": sha256(target.config.to_json_string().encode()).hexdigest()[:16],
        "runner": identity.runner,
        "attention": identity.attention,
        "dtype": target.dtype_name,
    }


def keep(costs: Costs, key: remembered.Key) -> None:
    """Remember `costs` of the target with this key."""
    value = {"target": costs.target, "seconds": costs.seconds, "laps": costs.laps, "spread": costs.spread}
    remembered.remember(KIND, key, value, disturbed=costs.disturbed)


def kept(key: remembered.Key) -> Costs | None:
    """What is remembered of the target with this key; None when there is nothing that holds."""
    fact = remembered.recall(KIND, key, _read)
    return _costs(fact) if fact is not None and fact.age < MOST_AGE else None


def correct(key: remembered.Key, seen: Mapping[int, float]) -> None:
    """Put right what is remembered by what a run saw: laps by nodes, of steps about where costs are measured.

    Costs that plain steps don't confirm are forgotten, and measured anew when they are next wanted.
    """

    def change(fact: Fact[dict[str, Any]]) -> dict[str, Any] | None:
        costs = _costs(fact)
        if costs.is_off(seen):
            return None
        return {**fact.value, "laps": costs.corrected(seen).laps}

    remembered.revise(KIND, key, _read, change)


def found(asked: Asked, runner: str) -> list[Costs]:
    """All costs of such a target with this runner, measured on this machine as it is set up now; the newest first."""
    machines = _machines()
    return [
        _costs(fact)
        for fact in remembered.every(KIND, _read)
        if _is_of_here(fact.key, machines)
        and {"runner", "attention"} <= set(fact.key)
        and fact.key["runner"] == runner
        and asked.means(fact.key, fact.value["target"])
    ]


def note_choice(target: "Target") -> None:
    """Remember which runner `auto` took, so that it can be told without loading the model."""
    key = {**setting_of(target.device), "fingerprint": target.fingerprint, "dtype": target.dtype_name}
    value = {"target": target.name, "runner": target.identity.runner}
    before = remembered.recall(CHOICES, key, _read_choice)
    if before is None or before.value != value:
        remembered.remember(CHOICES, key, value)


def chosen_runner(asked: Asked) -> str | None:
    """The runner that `auto` took for such a target when it was last loaded here; None: never."""
    here = _machines()
    for fact in remembered.every(CHOICES, _read_choice):
        if _is_of_here(fact.key, here) and asked.means(fact.key, fact.value["target"]):
            return str(fact.value["runner"])
    return None


def machine_of(device: torch.device) -> str:
    """The processor or GPU: homes may be shared."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line for line in lines if line.startswith("model name")), str(device))


def _machines() -> set[str]:
    cuda = (torch.device("cuda", number) for number in range(torch.cuda.device_count()))
    return {machine_of(device) for device in (torch.device("cpu"), *cuda)}


def _is_of_here(key: remembered.Key, machines: Collection[str]) -> bool:
    """Whether it is a whole key, and this machine, as it is set up now, would run at these costs."""
    return (
        set(key) >= _NAMES
        and key["machine"] in machines
        and (key["threads"], key["waits"]) == (str(torch.get_num_threads()), how_threads_wait(os.environ))
        and (key["medusa"], key["torch"]) == (medusa_cli.__version__, torch.__version__)
    )


def _costs(fact: Fact[dict[str, Any]]) -> Costs:
    key, value = fact.key, fact.value
    return Costs(
        seconds=value["seconds"],
        laps=value["laps"],
        spread=value["spread"],
        disturbed=fact.disturbed,
        target=value["target"],
        fingerprint=key["fingerprint"],
        runner=key["runner"],
        attention=key["attention"],
        dtype=key["dtype"],
        device=key["device"],
        machine=key["machine"],
        threads=int(key["threads"]),
        measured=fact.at.isoformat(timespec="seconds"),
    )


def _read(value: Any) -> dict[str, Any]:
    """The value of a fact about costs. Raises ValueError and its like for something else."""
    seconds, laps, spread = _times(value["seconds"]), _times(value["laps"]), float(value["spread"])
    if 1 not in seconds or not isinstance(value["target"], str) or not (isfinite(spread) and spread >= 0):
        raise ValueError("no costs")
    return {"target": value["target"], "seconds": seconds, "laps": laps, "spread": spread}


def _times(value: Any) -> dict[int, float]:
    """Seconds by nodes."""
    times = {int(count): float(seconds) for count, seconds in value.items()}
    if not all(0 < count < _MOST_NODES and seconds > 0 and isfinite(seconds) for count, seconds in times.items()):
        raise ValueError("no times")
    return times


def _read_choice(value: Any) -> dict[str, str]:
    if not (isinstance(value["target"], str) and isinstance(value["runner"], str)):
        raise ValueError("no choice")
    return {"target": value["target"], "runner": value["runner"]}
