"""`python -m tests.prompt_memory`: what reading long prompts is said to take against what it takes.

Each row is a process of its own. What it took is the most that the system ever counted as resident (VmHWM) over what
was resident when the model had been loaded and had read one token.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.cli.harness import ROOT, make_model

_MIB = 2**20
RUNNERS, ATTENTIONS = ("eager", "packed", "blocks"), ("auto", "eager")


@dataclass(frozen=True)
class Grown:
    """Bytes over those of the loaded model: as estimated, and as they came; `before`: resident until then."""

    before: int
    estimated: int
    taken: int

    @property
    def ratio(self) -> float:
        """Estimated by taken."""
        return self.estimated / self.taken

    @property
    def peak_ratio(self) -> float:
        """The whole process's."""
        return (self.before + self.estimated) / (self.before + self.taken)


@dataclass(frozen=True)
class Reading:
    """What is read and written: prompts, their length, tokens after each, and how the model runs.

    what   text: prompts are read and texts written. states: texts are read for their hidden states
    """

    prompts: int = 64
    length: int = 1790
    new: int = 4
    runner: str = "eager"
    attention: str = "auto"
    what: str = "text"


def grown(model: str, reading: Reading) -> Grown:
    """Measured in a process of its own. Raises RuntimeError when it fails."""
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name, "--child", model, json.dumps(vars(reading))],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return Grown(**json.loads(done.stdout.splitlines()[-1]))


def _child(model: str, reading: Reading) -> None:
    """Load, look, read and write, look again."""
    import torch

    from medusa_cli.acceptance.greedy import Greedy
    from medusa_cli.assemble import load_target
    from medusa_cli.config.recipe import TargetSettings
    from medusa_cli.decode.loop import Parts, collect
    from medusa_cli.decode.memory import needed_bytes
    from medusa_cli.decode.rows import Limits
    from medusa_cli.drafters.none import NoDrafter
    from medusa_cli.model.runners.kinds import give_back_freed_memory

    settings = {"runner": reading.runner, "attention": reading.attention, "dtype": "float32", "device": "cpu"}
    target = load_target(TargetSettings.model_validate({"model": model, **settings}))
    parts, limits = Parts(target, NoDrafter(), Greedy()), Limits(reading.new)
    shape = reading.prompts, reading.length
    prompts = torch.randint(3, target.real_vocab, shape, generator=torch.Generator()).tolist()
    needed = needed_bytes(target, prompts, limits, len(prompts), 0)
    collect(parts, [prompts[0][:200]], limits)
    give_back_freed_memory()  # what loading left free would hide what comes
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from now on
    before = _resident("VmRSS")
    if reading.what == "text":
        collect(parts, prompts, limits, len(prompts))
    else:
        target.hidden(prompts)
    print(json.dumps({"before": before, "estimated": needed.total, "taken": _resident("VmHWM") - before}))


def _resident(what: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(what)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", help="else a random one of 7 million weights is made")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--length", type=int, default=1790)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        _child(given.child[0], Reading(**json.loads(given.child[1])))
        return
    with tempfile.TemporaryDirectory() as place:
        model = given.model or str(make_model(Path(place), hidden_size=256, layers=4, vocab=8_000, positions=4096))
        print(f"{'runner':<10}{'attention':<11}{'before':>8}{'estimated':>11}{'taken':>8}{'growth':>8}{'peak':>7}  MiB")
        for runner, attention in itertools.product(RUNNERS, ATTENTIONS):
            reading = Reading(given.prompts, given.length, runner=runner, attention=attention)
            each = grown(model, reading)
            print(
                f"{runner:<10}{attention:<11}{each.before // _MIB:>8,}{each.estimated // _MIB:>11,}"
                f"{each.taken // _MIB:>8,}{each.ratio:>8.2f}{each.peak_ratio:>7.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
