"""C++ is compiled once for this machine; who has no compiler is told why there is no library."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from medusa_cli.kernels import native
from medusa_cli.kernels.native import CannotCompile, library


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
    (built,) = (home / "kernels").iterdir()
    library.cache_clear()
    monkeypatch.setattr(native, "_compile", lambda *_: pytest.fail("compiled again"))
    assert library(source).seven() == 7
    assert [*(home / "kernels").iterdir()] == [built]


def test_processes_that_compile_at_once_all_get_a_whole_library(source: Path, home: Path) -> None:
    program = "import sys; from pathlib import Path; from medusa_cli.kernels.native import library as load; "
    program += "print(load(Path(sys.argv[1])).seven())"
    runs = [
        subprocess.Popen([sys.executable, "-c", program, str(source)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [run.communicate()[0] for run in runs] == ["7\n"] * 3
    assert len([*(home / "kernels").iterdir()]) == 1


def test_another_source_is_another_library(source: Path, home: Path) -> None:
    library(source)
    source.write_text('extern "C" int seven() { return 8; }')
    library.cache_clear()
    assert library(source).seven() == 8
    assert len([*(home / "kernels").iterdir()]) == 2


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
    assert [*(home / "kernels").iterdir()] == []


def test_a_home_that_can_not_be_written(source: Path, home: Path) -> None:
    home.write_text("a file where the folder should be")
    with pytest.raises(CannotCompile, match="home"):
        library(source)


def test_a_broken_library_is_told(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_it(source: Path, compiler: str, flags: tuple[str, ...], built: Path) -> None:
        built.parent.mkdir(parents=True)
        built.write_bytes(b"\x7fELF and nothing more")

    monkeypatch.setattr(native, "_compile", break_it)
    with pytest.raises(CannotCompile, match=r"seven\.cpp: .*seven-.*\.so"):
        library(source)
