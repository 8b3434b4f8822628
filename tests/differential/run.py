"""The long run: every architecture of the library, every variant; a line of JSON for each case in a file.

Cases that stand in the file are not run again, so a run that was stopped goes on. Each architecture runs in a process
of its own with a limit of time and memory: one that crashes or hangs takes no other with it.
    python -m tests.differential.run FILE [--only llama,gemma3] [--again differs,broken]
"""

import argparse
import json
import multiprocessing
import os
import resource
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers

from tests.differential.compare import Case, Finding, examine
from tests.differential.shrink import model_types
from tests.differential.variants import BASE, variants

MEMORY, SECONDS = 4 << 30, 900
WAYS = (("auto", "packed"), ("eager", "eager"), ("sdpa", "eager"))  # attention and runner, of the config as it comes
OTHER_WAYS = WAYS[:1]


def cases_of(model_type: str, base: bool) -> Iterator[Case]:
    """What is compared of an architecture: of the config as it comes, or of its variants."""
    for variant in variants(model_type):
        if (variant == BASE) == base:
            for attention, runner in WAYS if base else OTHER_WAYS:
                yield Case(model_type, variant, attention, runner)


def _examine_all(cases: Sequence[Case], file: Path) -> None:
    """In a process of its own."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for case in cases:
        _write(file, examine(case))


def _write(file: Path, finding: Finding) -> None:
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(finding.as_json()) + "\n")


def read(file: Path) -> list[dict[str, object]]:
    """What stands in the file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def _case(line: dict[str, object]) -> Case:
    return Case(*(str(line[name]) for name in ("model_type", "variant", "attention", "runner")))


def main(arguments: Sequence[str]) -> None:
    """Run what is missing. `page` says what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="architectures, with commas between")
    parser.add_argument("--again", default="", help="outcomes that are run anew")
    parser.add_argument("--part", default="0/1", help="1/2: the second half of the architectures")
    wanted = parser.parse_args(arguments)
    if again := set(filter(None, wanted.again.split(","))):
        kept = [line for line in read(wanted.file) if line["outcome"] not in again]
        wanted.file.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    part, parts = map(int, wanted.part.split("/"))
    names = wanted.only.split(",") if wanted.only else model_types()[part::parts]
    for base in (True, False):  # first every architecture as it comes
        for model_type in names:
            _in_own_process(model_type, base, wanted.file)


def _in_own_process(model_type: str, base: bool, file: Path) -> None:
    """Run the cases that the file lacks; the one that kills its process is written down, and the rest goes on."""
    while missing := _missing(model_type, base, file):
        process = multiprocessing.get_context("fork").Process(target=_examine_all, args=(missing, file))
        process.start()
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
        if not process.exitcode:
            break
        if lost := _missing(model_type, base, file):
            _write(file, Finding(lost[0], "broken", f"its process ended with {process.exitcode}"))


def _missing(model_type: str, base: bool, file: Path) -> list[Case]:
    done = {_case(line) for line in read(file)}
    return [case for case in cases_of(model_type, base) if case not in done]


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    with TemporaryDirectory() as home:
        os.environ["MEDUSA_HOME"] = home
        main(sys.argv[1:])
