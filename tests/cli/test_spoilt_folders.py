"""Files of a run folder that a disk or a copy spoilt: told, or made anew; what is good is never written over."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.harness import Done, run_here, train_args
from tests.run_folders import differences

SHORT = (
    "--max-steps", 4, "--save-steps", 2, "--tree-size", 5, "data.rows=1", "data.max_answer_tokens=12", "--runner",
    "eager", "-q",
)  # fmt: skip
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda whole: b"",
    "cut": lambda whole: whole[: len(whole) // 2],
    "garbage": lambda whole: (bytes(range(256)) * (len(whole) // 256 + 1))[: max(300, len(whole))],
}
ANEW, TOLD = "made anew", "told"
FILES = {
    "run.json": {"empty": TOLD, "cut": TOLD, "garbage": TOLD},
    "written/prompts.jsonl": {"empty": ANEW, "cut": ANEW, "garbage": TOLD},
    "written/answers/store.json": {"empty": TOLD, "cut": TOLD, "garbage": TOLD},
    "written/answers/samples.jsonl": {"empty": ANEW, "cut": ANEW, "garbage": TOLD},
    "written/answers/hidden.f16": {"empty": ANEW, "cut": ANEW, "garbage": TOLD},
    "written/answers/ids.i32": {"empty": ANEW, "cut": ANEW, "garbage": TOLD},
    "checkpoints/step-00000004.pt": {"empty": ANEW, "cut": ANEW, "garbage": ANEW},
    "checkpoints": {"empty": TOLD, "cut": TOLD, "garbage": TOLD},
    "all that is made of the heads": {"empty": ANEW, "cut": ANEW, "garbage": ANEW},
}
MADE = ("heads.safetensors", "heads.json", "tree.json", "accuracy.json", "provenance.json", "README.md", ".lock")


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    run = tmp_path_factory.mktemp("whole") / "run"
    done = again(tiny, run)
    assert done.code == 0, done.err
    return run


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoilt."""
    return shutil.copytree(whole, tmp_path / "run")


def again(model: Path, run: Path) -> Done:
    return run_here(*train_args(model, run, *SHORT), "--resume-from-checkpoint")


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def spoilt_files(run: Path, name: str) -> list[Path]:
    if name == "checkpoints":
        return sorted((run / name).iterdir())
    return [run / made for made in MADE] if name.startswith("all") else [run / name]


@pytest.mark.parametrize(("name", "damage"), [(name, damage) for name in FILES for damage in DAMAGE])
def test_a_spoilt_file_is_told_or_made_anew_and_nothing_good_is_lost(
    name: str, damage: str, tiny: Path, whole: Path, run: Path
) -> None:
    for file in spoilt_files(run, name):
        file.write_bytes(DAMAGE[damage](file.read_bytes()))
    before = content(run)
    done = again(tiny, run)
    assert "Traceback" not in done.err
    if FILES[name][damage] == TOLD:
        assert done.code == 1, done.err
        assert done.err.count("error: ") == done.err.count("\n hint: ") == 1, done.err
        assert name.partition("/")[0] in done.err
        assert content(run) == before
    else:
        assert done.code == 0, done.err
        assert differences(whole, run, exact=True) == []


def test_a_log_of_which_lines_are_spoilt_keeps_the_others(tiny: Path, run: Path) -> None:
    log = run / "train.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([lines[0], b"\x00\xff\n", b"[]\n", *lines[1:], b'{"step": 9']))
    assert again(tiny, run).code == 0
    assert log.read_bytes().splitlines(keepends=True) == lines


def test_a_folder_whose_samples_were_split_in_the_order_they_were_written_goes_on_so(
    tiny: Path, whole: Path, run: Path
) -> None:
    mark = json.loads((run / "run.json").read_text())
    assert mark.pop("order") == "keys"
    (run / "run.json").write_text(json.dumps(mark))
    assert again(tiny, run).code == 0
    assert json.loads((run / "run.json").read_text())["order"] is None
    shutil.rmtree(run / "checkpoints")
    assert again(tiny, run).code == 0
    assert json.loads((run / "run.json").read_text())["order"] == "keys"
    assert differences(whole, run, exact=True) == []
