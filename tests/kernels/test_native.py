"""C++ is compiled once for this machine; who has no compiler is told why there is no library."""

import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from medusa_cli.kernels import attend, blocks, native
from medusa_cli.kernels.ahead import compile_ahead
from medusa_cli.kernels.native import CannotCompile, library
from medusa_cli.util import sealed
from tests.damages import DAMAGES
from tests.strangers import STRANGER, as_root


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CXX", raising=False)
    library.cache_clear()
    yield tmp_path / "home"
    library.cache_clear()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "seven.cpp"
    file.write_text('extern "C" int seven() { return 7; }')
    return file


def test_a_source_is_compiled_once(source: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library(source).seven() == 7
    (built,) = (home / "code" / "kernels").iterdir()
    library.cache_clear()
    monkeypatch.setattr(native, "_compile", lambda *_: pytest.fail("compiled again"))
    assert library(source).seven() == 7
    assert [*(home / "code" / "kernels").iterdir()] == [built]


def test_threads_that_ask_at_once_get_one_compilation(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    compile_for_real = native._compile
    monkeypatch.setattr(native, "_compile", lambda *all_: (compiled.append(all_[0]), compile_for_real(*all_)))
    with ThreadPoolExecutor(3) as threads:
        assert [found.seven() for found in threads.map(library, [source] * 3)] == [7] * 3
    assert compiled == [source]


def test_what_is_compiled_ahead_is_there_when_it_is_asked_for(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for functions in (blocks.functions, attend.function):
        functions.cache_clear()
    compile_ahead()
    (thread,) = (each for each in threading.enumerate() if each.name == "medusa-compile")
    thread.join()
    ahead = {file.name.partition("-")[0] for file in (home / "code" / "kernels").iterdir()}
    compiled: list[Path] = []
    monkeypatch.setattr(native, "_compile", lambda source, *_: compiled.append(source))
    blocks.functions()
    attend.function()
    assert ahead == {"blocks", "attend"}
    assert compiled == []


def test_who_has_no_compiler_is_not_told_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    for functions in (blocks.functions, attend.function):
        functions.cache_clear()
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setattr(threading, "excepthook", lambda raised: pytest.fail(str(raised)))
    compile_ahead()
    for thread in [each for each in threading.enumerate() if each.name == "medusa-compile"]:
        thread.join()
    with pytest.raises(CannotCompile, match="/nowhere"):
        blocks.functions()


def test_processes_that_compile_at_once_all_get_a_whole_library(source: Path, home: Path) -> None:
    program = "import sys; from pathlib import Path; from medusa_cli.kernels.native import library as load; "
    program += "print(load(Path(sys.argv[1])).seven())"
    runs = [
        subprocess.Popen([sys.executable, "-c", program, str(source)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [run.communicate()[0] for run in runs] == ["7\n"] * 3
    assert len([*(home / "code" / "kernels").iterdir()]) == 1


def test_another_source_is_another_library(source: Path, home: Path) -> None:
    library(source)
    source.write_text('extern "C" int seven() { return 8; }')
    library.cache_clear()
    assert library(source).seven() == 8
    assert len([*(home / "code" / "kernels").iterdir()]) == 2


def test_no_compiler(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(CannotCompile, match=r"no C\+\+ compiler: looked for c\+\+, g\+\+, clang\+\+"):
        library(source)


def test_a_compiler_that_is_not_there(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CannotCompile, match="looked for no-such-compiler"):
        library(source)


def test_a_source_that_does_not_compile_leaves_nothing(source: Path, home: Path) -> None:
    source.write_text("int seven( {")
    with pytest.raises(CannotCompile, match=r"can't compile seven.cpp: .*error"):
        library(source)
    assert [*(home / "code" / "kernels").iterdir()] == []


def test_a_home_that_can_not_be_written(source: Path, home: Path) -> None:
    home.write_text("a file where the folder should be")
    with pytest.raises(CannotCompile, match="home"):
        library(source)


def test_a_broken_library_is_told(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_it(source: Path, command: Sequence[str], flags: tuple[str, ...], built: Path) -> None:
        built.write_bytes(b"\x7fELF and nothing more")

    monkeypatch.setattr(native, "_compile", break_it)
    with pytest.raises(CannotCompile, match=r"seven\.cpp: .*seven-.*\.so"):
        library(source)


def test_a_compiler_may_be_a_command_of_several_words(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = tmp_path / "launch"
    launcher.write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/launched\nexec "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("CXX", f"{launcher} g++ '-DUNUSED=a b'")
    assert library(source).seven() == 7
    assert (tmp_path / "launched").read_text() == "g++\n"


def test_a_compiler_in_a_folder_with_a_space_needs_no_quotes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my tools").mkdir()
    (tmp_path / "my tools" / "g++").symlink_to(str(shutil.which("g++")))
    monkeypatch.setenv("CXX", str(tmp_path / "my tools" / "g++"))
    assert library(source).seven() == 7


@pytest.mark.parametrize("named", ["ccache 'g++", "no-such-launcher g++", "'' g++"])
def test_a_command_that_is_none_is_told(source: Path, monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    monkeypatch.setenv("CXX", named)
    with pytest.raises(CannotCompile, match=r"no C\+\+ compiler: .*g\+\+"):
        library(source)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("which", ["*.so", "sums.json"])
def test_a_damaged_library_is_compiled_anew_with_a_line(
    source: Path, home: Path, damage: str, which: str, caplog: pytest.LogCaptureFixture
) -> None:
    native.built(source)  # loaded, it would end this process with its own damage
    (file,) = home.glob(f"code/kernels/seven-*/{which}")
    DAMAGES[damage](file)
    loads_anew(source)
    (line,) = caplog.messages
    assert line.startswith("compiled anew, since ")
    assert str(file) in line
    (folder,) = (home / "code" / "kernels").iterdir()
    assert sorted(each.name for each in folder.iterdir()) == [f"{folder.name}.so", "sums.json"]


def planted(source: Path, folder: Path) -> Path:
    """A library of somebody else's in the place of ours, its list included: it would say 8."""
    theirs = folder / "theirs.cpp"
    theirs.write_text('extern "C" int seven() { return 8; }')
    ours = native.built(source)
    subprocess.run(["g++", "-shared", "-fPIC", str(theirs), "-o", str(ours)], check=True)
    (ours.parent / sealed.SUMS).unlink()
    sealed.seal(ours.parent)
    return ours


def loads_anew(source: Path) -> None:
    assert library(source).seven() == 7


@pytest.mark.parametrize("mode", [0o666, 0o777])
@pytest.mark.parametrize("which", ["the library", "its folder", "the list"])
def test_a_library_that_others_may_write_is_not_loaded(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, which: str
) -> None:
    library_file = planted(source, tmp_path)
    places = {"the library": library_file, "its folder": library_file.parent}
    opened = places.get(which, library_file.parent / sealed.SUMS)
    opened.chmod(mode | 0o111 if opened.is_dir() else mode)
    loads_anew(source)
    (line,) = caplog.messages
    assert line == f"compiled anew, since others may write to {opened}"


@as_root
@pytest.mark.parametrize("which", ["the library", "its folder", "the list"])
def test_a_library_of_somebody_else_is_not_loaded(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, which: str
) -> None:
    library_file = planted(source, tmp_path)
    theirs = {"the library": library_file, "its folder": library_file.parent}.get(
        which, library_file.parent / sealed.SUMS
    )
    os.chown(theirs, STRANGER, STRANGER)
    loads_anew(source)
    assert caplog.messages == [f"compiled anew, since {theirs} belongs to user {STRANGER}"]


def test_what_is_compiled_is_for_this_user_alone_whatever_the_umask(source: Path, home: Path) -> None:
    before = os.umask(0)
    try:
        library(source)
    finally:
        os.umask(before)
    made = [home, *home.rglob("*")]
    assert {stat.S_IMODE(each.stat().st_mode) & 0o077 for each in made} == {0}


def test_the_current_folder_is_no_place_for_libraries(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEDUSA_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.chdir(tmp_path)
    assert library(source).seven() == 7
    assert not (tmp_path / "here").exists()


def test_graphs_find_their_functions_and_other_libraries_find_nothing_of_torch() -> None:
    # a library of its own standard library crashed on being imported: torch's parts stood before its own
    program = """
import ctypes
from medusa_cli.kernels import graph
graph.load()
everybody = ctypes.CDLL(None)
assert all(hasattr(everybody, name) for name in graph.CALLED)
assert not hasattr(everybody, "aoti_torch_get_data_ptr")
assert not hasattr(everybody, "multiply")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
