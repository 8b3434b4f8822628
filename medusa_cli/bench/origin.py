"""Where a measurement comes from: when, on which machine, with which versions, by which command line."""

import platform
import shlex
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

from medusa_cli import __version__
from medusa_cli.model.costs.kept import machine_of
from medusa_cli.util.busy import cores


@dataclass(frozen=True)
class Origin:
    """What makes a measurement one that can be repeated.

    date      when it began, as ISO 8601 with the time zone
    machine   the processor, its cores and its memory, or the GPU
    versions  by package
    command   the command line
    """

    date: str
    machine: str
    versions: dict[str, str]
    command: str


def origin_here(device: torch.device, program: str = "medusa") -> Origin:
    """Of what begins now, in this process. `program` is what its arguments were given to."""
    return Origin(
        datetime.now(UTC).isoformat(timespec="seconds"),
        machine_here(device),
        {"medusa": __version__, "python": platform.python_version()}
        | {name: version(name) for name in ("torch", "transformers")},
        shlex.join([*program.split(), *sys.argv[1:]]),
    )


def machine_here(device: torch.device) -> str:
    """`AMD EPYC 7763 64-Core Processor, 2 cores, 24 GiB`; a GPU's name."""
    name = " ".join(machine_of(device).rpartition(":")[2].split())
    if device.type != "cpu":
        return name
    memory = _memory_gib()
    parts = [name if name != "cpu" else platform.machine(), f"{cores()} cores", f"{memory:.0f} GiB" if memory else ""]
    return ", ".join(part for part in parts if part)


def _memory_gib() -> float | None:
    """Memory of the machine; None where nobody can tell."""
    told = Path("/proc/meminfo")
    lines = told.read_text(encoding="ascii").splitlines() if told.exists() else []
    return next((int(line.split()[1]) / 2**20 for line in lines if line.startswith("MemTotal:")), None)
