"""One model and one training run, shared by all tests of the commands."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.copies import Copy
from tests.cli.harness import (
    FEW,
    LAYOUTS,
    Done,
    Medusa,
    Trained,
    joint_args,
    kill_group,
    make_model,
    rows_of,
    run_here,
    start,
    train_args,
)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model every test here decodes with."""
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def medusa() -> Medusa:
    return run_here


@pytest.fixture(scope="session")
def trained(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Heads trained on prompts and answers that the model wrote itself."""
    folder = tmp_path_factory.mktemp("runs") / "self"
    return Trained(folder, run_here(*train_args(tiny, folder, "--tree-size", 6, "--json")))


@pytest.fixture
def heads(trained: Trained) -> Path:
    """A folder of heads for the tiny model."""
    assert trained.done.code == 0, trained.done.err
    return trained.folder


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the program; nothing it started outlives the test."""
    processes: list[subprocess.Popen[str]] = []

    def begin(*args: object, **environment: str) -> subprocess.Popen[str]:
        processes.append(start(*args, **environment))
        return processes[-1]

    yield begin
    for process in processes:
        kill_group(process)


@pytest.fixture
def forked(tmp_path: Path) -> Iterator[Callable[..., Copy]]:
    """Starts copies of the program; none outlives the test."""
    copies: list[Copy] = []

    def begin(*args: object, before: Callable[[], object] = lambda: None) -> Copy:
        copies.append(Copy(tmp_path / f"stderr-{len(copies)}", *args, before=before))
        return copies[-1]

    yield begin
    for copy in copies:
        copy.kill()


@pytest.fixture(scope="module")
def unbroken(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing stopped, with the `args` of the tests' own file."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    done = run_here(*request.module.args(tiny, folder))
    assert done.code == 0, done.err
    return folder


@pytest.fixture
def write_data(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows to the file that `train_on_data` learns from."""

    def write(*rows: Any) -> Path:
        file = tmp_path / "data.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file

    return write


@pytest.fixture
def train_on_data(medusa: Medusa, tiny: Path, tmp_path: Path) -> Callable[..., Done]:
    """A run of a few steps into tmp_path/run on tmp_path/data.jsonl."""
    data = tmp_path / "data.jsonl"
    return lambda *more: medusa(*train_args(tiny, tmp_path / "run", *FEW, "--dataset", data, *more))


@pytest.fixture
def train(medusa: Medusa, tiny: Path, tmp_path: Path) -> Callable[..., Done]:
    """A run of a few steps into tmp_path/run."""
    return lambda *more, folder="run": medusa(*train_args(tiny, tmp_path / folder, "--max-steps", 5, "-q", *more))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "data.jsonl"
    file.write_text(rows_of(12, LAYOUTS["messages"]))
    return file


@pytest.fixture
def generate(medusa: Medusa, tiny: Path, heads: Path) -> Medusa:
    def run(*args: object, stdin: str | bytes = "", heads: Path | None = heads):
        named = ("--heads", heads) if heads else ()
        # how fast a tiny model is says nothing, so guesses are made whether they pay or not
        watched = () if "--speculate" in args else ("--speculate", "on")
        return medusa("generate", "-m", tiny, "--dtype", "float32", "-n", 40, *named, *watched, *args, stdin=stdin)

    return run


@pytest.fixture
def another_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding finds another text."""
    from medusa_cli.decode import exactness, loop

    other = loop.Generation([1, 2, 3], "length", [1, 1], [1, 1])
    monkeypatch.setattr(exactness, "collect", lambda *_: [other])


@pytest.fixture(scope="session")
def model_before(tiny: Path) -> bytes:
    """The model's weights as they were before anything learnt."""
    return (tiny / "model.safetensors").read_bytes()


@pytest.fixture(scope="session")
def joint(tiny: Path, model_before: bytes, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """Heads that learnt alone and then with an adapter, and how the run ended."""
    folder = tmp_path_factory.mktemp("runs") / "joint"
    done = run_here(*joint_args(tiny, folder, "--json"))
    assert done.code == 0, done.err
    return folder, done
