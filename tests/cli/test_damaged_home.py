"""What is remembered between runs may be damaged or planted: every command writes the same, and finds it out again."""

import os
import shutil
from pathlib import Path

import pytest

from medusa_cli.model.runners import autotune
from medusa_cli.util.paths import say_once
from tests.cli.harness import Done, Trained, run_here
from tests.damages import DAMAGES
from tests.strangers import STRANGER, as_root

ASKED = ("w1 w2 w3 w2 w3", "-n", 8, "--json", "--drafter", "mixed")
NEVER = (b"null", b"[]", b"{}", b"[" * 10**5, b'{"result": {}, "seconds": {"1": -1}, "value": null}', b"\xff\xfe")


def generate(home: Path, tiny: Path, trained: Trained) -> Done:
    """The same command on whatever is in this home."""
    say_once.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEDUSA_HOME", str(home))
        patch.setattr(autotune, "LEAST_NUMBERS", 0)  # small models are measured too
        return run_here("generate", "-m", tiny, "--heads", trained.folder, *ASKED)


@pytest.fixture(scope="module")
def first(tiny: Path, trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which everything is remembered that one command remembers."""
    home = tmp_path_factory.mktemp("first") / "home"
    done = generate(home, tiny, trained)
    assert done.code == 0, done.err
    return home


def facts_in(home: Path) -> list[Path]:
    """The files of checks, costs and runners."""
    return sorted(file for file in home.rglob("*.json") if "code" not in file.parts and file.name != "sums.json")


def copied(home: Path, to: Path) -> list[Path]:
    """The facts of a copy of this home, which others of the machine could enter."""
    shutil.copytree(home, to)
    for folder in (to, *(inner for inner in to.rglob("*") if inner.is_dir())):
        folder.chmod(0o755)
    return facts_in(to)


def text_of(done: Done) -> str:
    assert done.code == 0, done.err
    return str(done.document["text"])


def test_there_is_a_fact_of_each_kind(first: Path) -> None:
    assert {file.parent.name for file in facts_in(first)} >= {"checks", "costs", "runners"}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_facts_are_found_out_again(
    first: Path, tiny: Path, trained: Trained, tmp_path: Path, damage: str
) -> None:
    wanted = text_of(generate(first, tiny, trained))
    for file in copied(first, tmp_path / "home"):
        DAMAGES[damage](file)
    assert text_of(generate(tmp_path / "home", tiny, trained)) == wanted


@pytest.mark.parametrize("content", NEVER)
def test_facts_of_another_kind_are_found_out_again(
    first: Path, tiny: Path, trained: Trained, tmp_path: Path, content: bytes
) -> None:
    for file in copied(first, tmp_path / "home"):
        file.write_bytes(content)
    assert generate(tmp_path / "home", tiny, trained).code == 0
    for file in facts_in(tmp_path / "home"):
        assert file.read_bytes() != content, f"{file} was left as it was"


@pytest.mark.parametrize("owner", ["others may write", pytest.param("somebody else", marks=as_root)])
def test_facts_that_others_can_have_written_are_not_believed(
    first: Path, tiny: Path, trained: Trained, open_folder: Path, owner: str
) -> None:
    lies = copied(first, open_folder / "home")
    for file in lies:
        file.write_text(file.read_text().replace('"max_difference": ', '"max_difference": 9'))
        os.chown(file, STRANGER, STRANGER) if owner == "somebody else" else file.chmod(0o666)
    before = {file: file.stat().st_mtime_ns for file in lies}
    assert generate(open_folder / "home", tiny, trained).code == 0
    for file, written in before.items():
        assert file.stat().st_uid == os.geteuid(), f"{file} is still theirs"
        assert file.stat().st_mtime_ns != written, f"{file} was believed"
