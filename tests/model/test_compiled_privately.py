"""torch's compiler works where nobody else can write, and loading a program runs nothing from elsewhere."""

import functools
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch._dynamo  # noqa: F401 - imported beforehand: it makes an empty folder in the place that is watched here
from torch._inductor import cpu_vec_isa
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

from medusa_cli.kernels.native import CannotCompile
from medusa_cli.model.runners import compiled
from tests.tiny_models import target_of, tiny_model

TOUCHES = frozenset(
    {"open", "os.mkdir", "os.listdir", "os.scandir", "os.rename", "os.link", "subprocess.Popen", "ctypes.dlopen"}
)
watched: list[tuple[str, str]] | None = None


def _note(event: str, given: tuple[object, ...]) -> None:
    if watched is not None and event in TOUCHES:
        watched.append((event, repr(given)))


@functools.cache
def _hook() -> None:
    """Once: the interpreter never forgets a hook."""
    sys.addaudithook(_note)


@contextmanager
def watching() -> Iterator[list[tuple[str, str]]]:
    """All files, folders, programs and libraries that this process asks for."""
    global watched
    watched = []
    _hook()
    try:
        yield watched
    finally:
        watched = None


def test_a_build_and_a_load_touch_nothing_that_others_can_make_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with watching() as touched:
        target = target_of(tiny_model("llama"), "grouped", "compiled")
    assert target.identity.runner == "compiled"
    # C++ was compiled, and what was written lay in the home
    assert any(event == "subprocess.Popen" and str(tmp_path / "home") in what for event, what in touched)
    assert [each for each in touched if default_cache_dir() in each[1]] == []
    forwards = tmp_path / "home" / "code" / "forwards"
    assert [each.name for each in forwards.iterdir()] == [compiled.folder_of(target.model).name]

    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", lambda: pytest.fail("compiles and runs a test of the processor"))
    with watching() as touched:
        again = target_of(tiny_model("llama"), "grouped", "auto")
    assert again.identity.runner == "compiled"
    assert [each for each in touched if default_cache_dir() in each[1]] == []


def test_torch_works_in_a_folder_that_is_this_users_alone_and_goes(tmp_path: Path) -> None:
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    with compiled._torch_in_private(tmp_path) as command:
        work = Path(cache_dir())
        assert work.parent == tmp_path
        assert stat.S_IMODE(work.stat().st_mode) == 0o700
        assert Path(command).name in compiled.FOR_TORCH
    assert not list(tmp_path.iterdir())
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before


def test_a_home_with_a_space_in_its_name_has_another_place_for_torch(tmp_path: Path) -> None:
    (tmp_path / "my home").mkdir()
    with compiled._torch_in_private(tmp_path / "my home"):
        work = Path(cache_dir())
        assert " " not in str(work)
        assert stat.S_IMODE(work.stat().st_mode) == 0o700
        assert work != Path(default_cache_dir())


def test_a_temporary_folder_that_others_may_change_is_refused(
    open_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_folder.chmod(0o777)
    (tmp_path / "my home").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(open_folder))
    with pytest.raises(CannotCompile, match="others may write"), compiled._torch_in_private(tmp_path / "my home"):
        pytest.fail("compiled where others may write")


def test_torch_is_given_a_command_of_several_words_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = tmp_path / "my launcher"
    launcher.write_text(f'#!/bin/sh\necho "$@" >> "{tmp_path}/launched"\nexec "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{launcher}' g++ -DUNUSED")
    with compiled._torch_in_private(tmp_path) as command:
        assert Path(command).name == "g++"
        said = subprocess.check_output([command, "--version"], text=True)
    assert said == subprocess.check_output([str(shutil.which("g++")), "-DUNUSED", "--version"], text=True)
    assert (tmp_path / "launched").read_text() == "g++ -DUNUSED --version\n"
