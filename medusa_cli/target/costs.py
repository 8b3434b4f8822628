"""Costs of steps that were measured on this machine: kept under the cache home, found again without loading a model."""

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from medusa_cli.atomic import write_atomically
from medusa_cli.home import cache_home
from medusa_cli.util.trusted import read_private

_MOST_NODES = 10_000  # of a step; more were never measured


@dataclass(frozen=True)
class Costs:
    """What a step of one row costs, of which weights, and how that was measured.

    seconds       medians by nodes verified, the root included; the drafter's own time is not in them
    target        the name the model was asked for by
    fingerprint   of its weights
    machine       the processor or the GPU
    measured      when, as ISO 8601 with the time zone
    """

    seconds: dict[int, float]
    target: str
    fingerprint: str
    runner: str
    dtype: str
    device: str
    machine: str
    threads: int
    measured: str


@dataclass(frozen=True)
class Asked:
    """Which costs are looked for. None: any; fingerprint None: by the target's name alone."""

    target: str
    fingerprint: str | None = None
    runner: str | None = None
    dtype: str | None = None
    device: str | None = None

    def fits(self, costs: Costs) -> bool:
        """Whether these are such costs."""
        same = costs.target == self.target if self.fingerprint is None else costs.fingerprint == self.fingerprint
        wanted = ((self.runner, costs.runner), (self.dtype, costs.dtype))
        kind = self.device is None or costs.device.partition(":")[0] == self.device.partition(":")[0]
        return same and kind and all(asked in (None, found) for asked, found in wanted)


def folder() -> Path:
    """Where costs are kept, a file for each model and way of running it."""
    return cache_home() / "costs"


def keep(costs: Costs, name: str) -> None:
    """Write `costs` under this name. Raises OSError."""
    folder().mkdir(parents=True, exist_ok=True)
    write_atomically(folder() / f"{name}.json", json.dumps(asdict(costs)) + "\n")


def kept(name: str) -> Costs | None:
    """What was kept under this name; None when there is nothing, or nothing of use."""
    return _read(folder() / f"{name}.json")


def found(asked: Asked) -> list[Costs]:
    """All costs that fit, measured on this machine with as many threads as now; the newest first."""
    machines = {machine_of(torch.device("cpu"))}
    machines |= {machine_of(torch.device("cuda", number)) for number in range(torch.cuda.device_count())}
    every = (_read(file) for file in sorted(folder().glob("*.json")))
    fitting = [costs for costs in every if costs and asked.fits(costs) and _is_of_here(costs, machines)]
    return sorted(fitting, key=lambda costs: datetime.fromisoformat(costs.measured), reverse=True)


def machine_of(device: torch.device) -> str:
    """The processor or GPU: homes may be shared."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line for line in lines if line.startswith("model name")), str(device))


def _is_of_here(costs: Costs, machines: Collection[str]) -> bool:
    """Whether this machine, as it is set up now, would run at these costs."""
    return costs.machine in machines and costs.threads == torch.get_num_threads()


def _read(file: Path) -> Costs | None:
    """The costs in a file; None when it can't be read or holds something else."""
    try:
        return _checked(json.loads(read_private(file) or b""))
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError):
        return None


def _checked(content: dict[str, Any]) -> Costs | None:
    """Costs from JSON; None, or one of the errors `_read` catches, where the plain step or a fact is missing."""
    seconds = {int(count): float(time) for count, time in content["seconds"].items()}
    words = {name: content[name] for name in ("target", "fingerprint", "runner", "dtype", "device", "machine")}
    measured, threads = content["measured"], content["threads"]
    if not all(isinstance(value, str) for value in words.values()) or not isinstance(threads, int):
        return None
    if datetime.fromisoformat(measured).tzinfo is None:
        return None
    is_curve = 1 in seconds and all(
        0 < count < _MOST_NODES and time > 0 and isfinite(time) for count, time in seconds.items()
    )
    return Costs(seconds, **words, threads=threads, measured=measured) if is_curve else None
