"""What a kind of file is to the mutations, and a command run in this process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from medusa_cli.errors import MedusaError
from tests.cli.harness import run_here

QUICK = ("--dtype", "float32", "--runner", "eager", "-n", 3, "-q")


class Bug(Exception):
    """The program called itself wrong, or ended as no command may."""


@dataclass(frozen=True)
class Kind:
    """One kind of file.

    make      lays out a folder in which all is well; all is called in the folder, which is then `.`
    victims   files of it that are damaged, with how they are built
    read      what a command does with the folder; raises MedusaError where it refuses it, anything else is a bug
    command   that command, for a sample
    mend      afterwards, in some of the cases: checksums that go with what was damaged, so that readers go on
    """

    make: Callable[[Path], object]
    victims: Mapping[str, str]
    read: Callable[[Path, str], object]
    command: Callable[[Path, str], list[object]]
    mend: Callable[[Path, str], object] = lambda folder, victim: None


def run(*args: object) -> None:
    """The command in this process. Raises MedusaError where it refuses, and Bug unless it ends as a command may."""
    done = run_here(*args)
    said = " ".join(done.err.split())
    if done.code not in (0, 1, 2, 3) or "this is a bug" in said or "Traceback" in said:
        raise Bug(f"exit {done.code}: {said[-300:]}")
    if done.code == 1:
        if "error: " not in said or " hint: " not in said:
            raise Bug(f"exit 1 without a word: {said[-300:]}")
        raise MedusaError(*said.split("error: ", 1)[1].split(" hint: ", 1))
