"""The run folder: one run at a time, nothing half-written left, and marks that can be read."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from medusa_cli.config.loading import load_recipe
from medusa_cli.config.recipe import Recipe
from medusa_cli.errors import FormatError, RecipeError, TrainingError
from medusa_cli.pipeline.run_folder import RunFolder, open_folder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return open_folder(Recipe(output_dir=str(tmp_path / "run")), resume=True)


def part_of(path: Path) -> Path:
    """As a killed writer of this file leaves one."""
    part = path.with_name(f".{path.name}.0123456789abcdef.medusa-part")
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_text("half")
    return part


def test_files_that_a_kill_left_half_written_are_gone_once_a_run_has_the_folder(folder: RunFolder) -> None:
    names = ("run.json", "README.md", "checkpoints/step-00000004.pt", "written/answers/store.json", "adapter/weights")
    parts = [part_of(folder.path / name) for name in names]
    folder.claim("abc")
    with open_folder(folder.recipe, resume=True).to_itself():
        assert not any(part.exists() for part in parts)


def test_files_of_others_stay_however_they_are_called(folder: RunFolder, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    theirs = [part_of(folder.path / "photo.jpg"), part_of(folder.path / "photos/photo.jpg"), part_of(outside / "a")]
    for name in (".photo.jpg.part", ".README.md.12.part", "written/.photo.jpg.part", "written/answers/whole.part"):
        theirs.append(folder.path / name)
        theirs[-1].parent.mkdir(parents=True, exist_ok=True)
        theirs[-1].write_text("theirs")
    (folder.path / "joint").symlink_to(outside)
    folder.claim("abc")
    with open_folder(folder.recipe, resume=True).to_itself():
        assert [each for each in theirs if not each.exists()] == []


@pytest.mark.parametrize("names", [("README.md",), ("config.json", "model.safetensors"), ("setup.py", "tree.json")])
def test_a_folder_that_holds_something_else_is_refused_as_it_is(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_text("theirs")
    with pytest.raises(TrainingError, match=r"which no run of medusa wrote: nothing there is replaced") as caught:
        open_folder(Recipe(output_dir=str(tmp_path)), resume=True)
    assert names[0] in caught.value.message
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(names)


def test_a_run_that_never_began_leaves_no_folder_and_takes_none_that_holds_something(folder: RunFolder) -> None:
    def fail(folder: RunFolder) -> None:
        with pytest.raises(FormatError), folder.to_itself():
            raise FormatError("no such heads", "name others")

    (folder.path / "written").mkdir()
    fail(folder)
    assert folder.path.exists()
    (folder.path / "written").rmdir()
    fail(folder)
    assert not folder.path.exists()


def test_no_folder_is_not_the_current_one() -> None:
    with pytest.raises(RecipeError, match="output_dir"):
        load_recipe(None, (), {"output_dir": ""}, {})


def test_a_run_that_ended_since_the_folder_was_looked_at_is_noticed(folder: RunFolder) -> None:
    other = open_folder(folder.recipe, resume=True)
    with other.to_itself():
        other.claim("abc")
    with pytest.raises(TrainingError, match="another run has just written to") as caught, folder.to_itself():
        pass
    assert caught.value.hint == "run the same command again"
    with open_folder(folder.recipe, resume=True).to_itself():
        pass


def test_of_two_processes_one_has_the_folder_and_a_kill_gives_it_back(folder: RunFolder) -> None:
    holding = (
        "import sys, time; from medusa_cli.pipeline.run_folder import open_folder\n"
        "from medusa_cli.config.recipe import Recipe\n"
        f"with open_folder(Recipe(output_dir={str(folder.path)!r}), resume=True).to_itself():\n"
        "    print('held', flush=True); time.sleep(300)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", holding], stdout=subprocess.PIPE, text=True, cwd=os.getcwd())
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(TrainingError, match="another run is writing to"), folder.to_itself():
            pass
    finally:
        process.kill()
        process.wait()
    with folder.to_itself():
        pass


@pytest.mark.parametrize("text", ["[]", '{"data": 3}', '"text"'])
def test_a_mark_that_names_no_settings_is_told(folder: RunFolder, text: str) -> None:
    (folder.path / "run.json").write_text(text)
    with pytest.raises(TrainingError, match=r"run\.json is damaged: it names no settings"):
        open_folder(folder.recipe, resume=True)


def test_an_empty_mark_beside_samples_is_told_but_none_at_all_or_one_alone_is_a_start(folder: RunFolder) -> None:
    (folder.path / "written").mkdir()
    assert open_folder(folder.recipe, resume=True).found == {}
    (folder.path / "written").rmdir()
    (folder.path / "run.json").touch()
    assert open_folder(folder.recipe, resume=True).found == {}
    (folder.path / "written").mkdir()
    with pytest.raises(TrainingError, match="whose run this is can't be told"):
        open_folder(folder.recipe, resume=True)


def test_samples_of_a_folder_that_trained_before_are_split_as_they_were(folder: RunFolder) -> None:
    assert folder.by_keys
    (folder.path / "checkpoints").mkdir()
    folder.claim("abc")
    (folder.path / "checkpoints/step-00000001.pt").write_bytes(b"")
    before = open_folder(folder.recipe, resume=True)
    assert not before.by_keys
    before.begin_training("abc")
    assert json.loads((folder.path / "run.json").read_text())["order"] is None
    (folder.path / "checkpoints/step-00000001.pt").unlink()
    anew = open_folder(folder.recipe, resume=True)
    assert anew.by_keys
    anew.begin_training("abc")
    assert json.loads((folder.path / "run.json").read_text())["order"] == "keys"
