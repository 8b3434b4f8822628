"""Whatever happened to what is kept compiled: the same text is written, and a line says what was done about it."""

import functools
import json
import logging
import multiprocessing
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.decode.loop import Parts, collect
from medusa_cli.decode.rows import Limits
from medusa_cli.errors import TargetError
from medusa_cli.kernels import attend, blocks, graph, native
from medusa_cli.model.runners import compiled
from medusa_cli.util.paths import cache_home, say_once
from tests.damages import DAMAGES
from tests.fakes import DRAFTERS, SHAPES
from tests.strangers import STRANGER, as_root
from tests.tiny_models import NUM_NEW, known, target_of, tiny_model

NAME = "gemma3_text"
PROGRAM = ("forward.pt2", "constants.pt", "sums.json")


@dataclass(frozen=True)
class Outcome:
    """What a process did: the runner it took, the text, its lines of log, and how many programs it compiled."""

    runner: str
    text: list[int]
    lines: list[str]
    compiled: int
    error: str = ""


@functools.cache
def program() -> Path:
    """The compiled program of the tiny model; a minute or two."""
    target = target_of(tiny_model(NAME), "grouped", "compiled")
    return compiled.folder_of(target.model)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with whole kernels and one whole program in it."""
    folder = program()
    for kept in (native.library, blocks.functions, attend.function, graph.load):
        kept.cache_clear()  # they may have been loaded from another home
    blocks.functions(), attend.function(), graph.load()
    shutil.copytree(cache_home() / "code" / "kernels", tmp_path / "home" / "code" / "kernels")
    shutil.copytree(folder, tmp_path / "home" / "code" / "forwards" / folder.name)
    return tmp_path / "home"


def write(home: Path, runner: str, compile_: Callable[[Path], object]) -> Outcome:
    """Write a text in a process of its own, which a damaged library could end.

    compile_   instead of torch's compiler
    """
    outcome = home.parent / "outcome.json"
    child = multiprocessing.get_context("fork").Process(target=_write, args=(home, runner, compile_, outcome))
    child.start()
    child.join(120)
    assert child.exitcode == 0
    return Outcome(**json.loads(outcome.read_text()))


def _write(home: Path, runner: str, compile_: Callable[[Path], object], outcome: Path) -> None:
    for kept in (native.library, blocks.functions, attend.function, graph.load, say_once):
        kept.cache_clear()
    lines: list[str] = []
    compiles: list[Path] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("medusa_cli").handlers = [Lines(logging.WARNING)]
    kernels = cache_home() / "code" / "kernels"
    os.environ["MEDUSA_HOME"] = str(home)
    # what the C++ compiler wrote, in no time: tests/kernels/test_native.py runs it
    native._compile = lambda source, command, flags, built: shutil.copy(kernels / built.stem / built.name, built)  # type: ignore[assignment]
    compiled._compile = lambda model, kinds, made: (compiles.append(made), compile_(made))  # type: ignore[assignment]
    try:
        target = target_of(tiny_model(NAME), "grouped", runner)
    except TargetError as error:
        found = Outcome("", [], lines, len(compiles), error.message)
    else:
        parts = Parts(target, DRAFTERS["random"](known(NAME).texts, SHAPES["wide"]), Greedy())
        (text,) = collect(parts, known(NAME).prompts[:1], Limits(NUM_NEW), max_rows=1)
        found = Outcome(target.identity.runner, text.token_ids, lines, len(compiles))
    outcome.write_text(json.dumps(asdict(found)))


def as_before(made: Path) -> None:
    """What torch's compiler wrote, in no time."""
    for name in PROGRAM[:2]:
        shutil.copy(program() / name, made / name)


def fail(made: Path) -> None:
    raise RuntimeError("nothing was to be compiled")


def test_a_whole_home_has_nothing_to_tell(home: Path) -> None:
    outcome = write(home, "auto", fail)
    assert outcome == Outcome("compiled", known(NAME).wanted(1)[0], [], 0)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("library", ["attend", "blocks", "graph"])
def test_a_damaged_kernel_is_compiled_anew(home: Path, library: str, damage: str) -> None:
    (file,) = (home / "code" / "kernels").glob(f"{library}-*/*.so")
    DAMAGES[damage](file)
    outcome = write(home, "auto", fail)
    (line,) = outcome.lines
    assert line.startswith(f"compiled anew, since {file} ")
    assert outcome == Outcome("compiled", known(NAME).wanted(1)[0], [line], 0)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", PROGRAM)
def test_auto_goes_without_a_damaged_program_and_says_why(home: Path, name: str, damage: str) -> None:
    file = home / "code" / "forwards" / program().name / name
    DAMAGES[damage](file)
    outcome = write(home, "auto", fail)
    (line,) = outcome.lines
    assert str(file) in line
    assert line.endswith("; --runner compiled makes it anew")
    assert outcome.runner != "compiled"
    assert outcome.text == known(NAME).wanted(1)[0]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", PROGRAM)
def test_a_damaged_program_that_is_asked_for_is_compiled_anew(home: Path, name: str, damage: str) -> None:
    file = home / "code" / "forwards" / program().name / name
    DAMAGES[damage](file)
    outcome = write(home, "compiled", as_before)
    (line,) = outcome.lines
    assert line.startswith("compiled anew, since ")
    assert str(file) in line
    assert outcome == Outcome("compiled", known(NAME).wanted(1)[0], [line], 1)
    assert write(home, "auto", fail) == Outcome("compiled", known(NAME).wanted(1)[0], [], 0)


def break_program(folder: Path) -> None:
    """Sealed all the same, as by a torch that wrote what it can't read."""
    (folder / "forward.pt2").write_bytes(b"PK and no program")


def test_a_program_that_does_not_load_is_refused_or_left_out(home: Path) -> None:
    folder = home / "code" / "forwards" / program().name
    shutil.rmtree(folder)
    outcome = write(home, "compiled", lambda made: (as_before(made), break_program(made)))
    assert outcome.error.startswith("the compiled runner can't run tiny: ")
    outcome = write(home, "auto", fail)
    (line,) = outcome.lines
    assert line.startswith("steps are slower than they could be: the compiled program of tiny can't be run: ")
    assert outcome == Outcome("blocks", known(NAME).wanted(1)[0], [line], 0)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("the compiler is out of order\nand says more"), "the compiler is out of order"),
        (RecursionError("maximum recursion depth exceeded\n\nWhile executing"), "maximum recursion depth exceeded"),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_a_compiler_that_fails_in_its_own_way_is_refused_in_one_line(home: Path, error: Exception, said: str) -> None:
    def fail(made: Path) -> None:
        raise error

    shutil.rmtree(home / "code" / "forwards")
    assert write(home, "compiled", fail).error == f"the compiled runner can't run tiny: {said}"
    assert not list((home / "code" / "forwards").iterdir())


@pytest.mark.parametrize("mode", [0o666, 0o777])
@pytest.mark.parametrize("name", PROGRAM)
def test_a_program_that_others_may_write_is_not_run(home: Path, name: str, mode: int) -> None:
    file = home / "code" / "forwards" / program().name / name
    file.chmod(mode)
    outcome = write(home, "auto", fail)
    (line,) = outcome.lines
    assert f"others may write to {file}; " in line
    assert outcome.runner != "compiled"


@as_root
@pytest.mark.parametrize("name", [*PROGRAM, ""])
def test_a_program_of_somebody_else_is_not_run(home: Path, name: str) -> None:
    theirs = home / "code" / "forwards" / program().name / name
    os.chown(theirs, STRANGER, STRANGER)
    outcome = write(home, "auto", fail)
    (line,) = outcome.lines
    assert f"{theirs} belongs to user {STRANGER}; " in line
    assert outcome.runner != "compiled"
