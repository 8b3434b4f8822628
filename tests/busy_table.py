"""Speeds of two or more sides (checkouts, environments) of `medusa generate`, at rest and with busy neighbours.

    make bench-busy BEFORE=../before            # this checkout against another
    python -m tests.busy_table --side now=. --side spin=.,GOMP_SPINCOUNT=300000 --busy 0,2 --rounds 5

A side is NAME=CHECKOUT[,VARIABLE=VALUE...]. Rounds are interleaved: in each, every side runs once at every load, and
the order turns. What the shell says of OpenMP's waiting is left out of every side, so that a side is what a user meets.
Ratios are taken within a round and against the first side, so that a change of the machine hits both.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

PROMPT = "Name three planets and say one thing about each."
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND")
PATIENCE_S = 600.0
# it ends with us, whatever ends us
NEIGHBOUR = "import os; ours = os.getppid()\nwhile os.getppid() == ours:\n    for _ in range(100_000): pass"
AT_REST, LOADED = 0.98, 2.0  # what the last side must reach against the first


@dataclass(frozen=True)
class Side:
    """A checkout and what its processes find in their environment."""

    name: str
    checkout: Path
    variables: dict[str, str]

    @classmethod
    def parse(cls, text: str) -> "Side":
        """NAME=CHECKOUT[,VARIABLE=VALUE...]."""
        name, _, rest = text.partition("=")
        checkout, *variables = rest.split(",")
        return cls(name, Path(checkout).resolve(), dict(one.split("=", 1) for one in variables))

    @property
    def environment(self) -> dict[str, str]:
        """Ours, without what says how threads wait, and with what the side adds."""
        kept = {name: value for name, value in os.environ.items() if name not in WAITING}
        return {**kept, "PYTHONPATH": str(self.checkout), **self.variables}


@dataclass
class Speeds:
    """Tokens a second, by round."""

    rates: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{statistics.median(self.rates):6.1f} ({min(self.rates):.1f} to {max(self.rates):.1f})"


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """So many processes that never rest."""
    busy = [subprocess.Popen([sys.executable, "-c", NEIGHBOUR]) for _ in range(count)]
    try:
        time.sleep(0.2 if count else 0.0)
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def rate_of(side: Side, args: Sequence[str]) -> float:
    """Tokens a second of one `medusa generate`, by its own clock; those of the time-out when it is hit."""
    command = [sys.executable, "-m", "medusa_cli", "generate", PROMPT, *args, "--json", "-q"]
    try:
        done = subprocess.run(
            command, env=side.environment, cwd=side.checkout, capture_output=True, text=True, timeout=PATIENCE_S
        )
    except subprocess.TimeoutExpired:
        return float(args[args.index("-n") + 1]) / PATIENCE_S
    if done.returncode:
        sys.exit(f"{side.name}: {done.stderr.strip()}")
    return float(json.loads(done.stdout)["output_throughput"])


def measure(
    sides: Sequence[Side], loads: Sequence[int], rounds: int, args: Sequence[str]
) -> dict[int, dict[str, Speeds]]:
    """Speeds by load and side. One run of each comes first: it measures what later runs remember."""
    for side in sides:
        rate_of(side, args)
    found = {load: {side.name: Speeds() for side in sides} for load in loads}
    for round_ in range(rounds):
        turned = [*sides[round_ % len(sides) :], *sides[: round_ % len(sides)]]
        for load in loads:
            for side in turned:
                with neighbours(load):
                    found[load][side.name].rates.append(rate_of(side, args))
            told = ", ".join(f"{side.name} {found[load][side.name].rates[-1]:.1f}" for side in sides)
            print(f"round {round_ + 1}, {load} busy: {told} tokens/s", file=sys.stderr, flush=True)
    return found


def report(found: dict[int, dict[str, Speeds]], first: str) -> Iterator[str]:
    """A line for each load and side."""
    for load, sides in found.items():
        for name, speeds in sides.items():
            ratios = [ours / theirs for ours, theirs in zip(speeds.rates, sides[first].rates, strict=True)]
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            yield f"{load} busy  {name:12} {speeds} tokens/s  {statistics.median(ratios):.2f}x of {first} ({spread})"


def passes(found: dict[int, dict[str, Speeds]], first: str, last: str) -> bool:
    """Whether the last side is as fast as the first at rest, and twice as fast beside busy neighbours."""
    return all(
        statistics.median(ours / theirs for ours, theirs in zip(sides[last].rates, sides[first].rates, strict=True))
        >= (LOADED if load else AT_REST)
        for load, sides in found.items()
    )


def main() -> int:
    """Measure and print; exit 1 when --gate is given and not passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--side", action="append", required=True, help="NAME=CHECKOUT[,VARIABLE=VALUE...]")
    parser.add_argument("--busy", default="0,2", help="busy processes beside, by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gate", action="store_true", help="exit 1 below 0.98x at rest or 2x when loaded")
    parser.add_argument("args", nargs="*", default=[], help="for medusa generate, after --")
    asked = parser.parse_args()
    sides = [Side.parse(text) for text in asked.side]
    args = asked.args or ["-m", "smollm2-135m", "--runner", "compiled", "-n", "64"]
    found = measure(sides, [int(load) for load in asked.busy.split(",")], asked.rounds, args)
    print("\n".join(report(found, sides[0].name)))
    return 1 if asked.gate and not passes(found, sides[0].name, sides[-1].name) else 0


if __name__ == "__main__":
    sys.exit(main())
