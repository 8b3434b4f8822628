"""`python -m tests.memory_table`: what `--plan` says a run needs against what it then takes, on models of some sizes.

Each row is a process of its own; what it took is the most that the system ever counted as resident (VmHWM).
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cli.harness import LAYOUTS, ROOT, make_model, rows_of

# getrusage would tell of the process that started this one as well
_PROGRAM = (
    "import re, sys; from medusa_cli.cli.app import main; code = main(sys.argv[1:]); "
    "told = re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read()); "
    "print(int(told[1]) * 1024, file=sys.stderr); sys.exit(code)"
)


@dataclass(frozen=True)
class Compared:
    """Bytes of one run: as planned, and as they came."""

    plan: dict[str, Any]
    taken: int

    @property
    def ratio(self) -> float:
        """Planned by taken."""
        return float(self.plan["memory"]["needed"]) / self.taken


def compare(args: list[str], environment: dict[str, str] | None = None) -> Compared:
    """The plan of these arguments of train-heads, and the run itself. Raises RuntimeError when either fails."""
    plan, _ = _run([*args, "--plan", "--json"], environment)
    _, told = _run([*args, "-q"], environment)
    return Compared(json.loads(plan), int(told.splitlines()[-1]))


def _run(args: list[str], environment: dict[str, str] | None) -> tuple[str, str]:
    """stdout and stderr of one run of the program."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, "train-heads", *args],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | (environment or {}),
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout, done.stderr


def arguments(folder: Path, model: Path, *more: str, own: bool = False) -> list[str]:
    """A short run of this model: on given answers, or on what it writes itself."""
    data = folder / "data.jsonl"
    data.write_text(rows_of(24, LAYOUTS["messages"]))
    given = () if own else ("--dataset", str(data))
    few = ("--num-samples", "24", "--max-steps", "3", "--max-seq-length", "120", "data.max_prompt_tokens=12")
    return ["-m", str(model), "--dtype", "float32", "-o", str(folder / "run"), *few, *given, *more]


SIZES: dict[str, dict[str, Any]] = {
    "40 M, 8 layers": {"hidden_size": 512, "layers": 8, "vocab": 8_000},
    "70 M, wide vocabulary": {"hidden_size": 512, "layers": 4, "vocab": 64_000},
    "110 M, tied": {"hidden_size": 768, "layers": 10, "vocab": 32_000, "tied": True},
}


def main() -> None:
    """Print the table."""
    print(f"{'model':<24}{'data':<8}{'planned MiB':>12}{'taken MiB':>11}{'ratio':>7}")
    for name, size in SIZES.items():
        for own in (False, True):
            with tempfile.TemporaryDirectory() as place:
                folder = Path(place)
                model = make_model(folder / "model", **size)
                both = compare(arguments(folder, model, own=own))
            planned, taken = both.plan["memory"]["needed"] >> 20, both.taken >> 20
            print(f"{name:<24}{'own' if own else 'given':<8}{planned:>12,}{taken:>11,}{both.ratio:>7.2f}", flush=True)


if __name__ == "__main__":
    main()
