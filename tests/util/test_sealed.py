"""A sealed folder is whole, or it is known what is wrong with it; a kill leaves the old one or the new one."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from medusa_cli.util import sealed

DAY_S = 24 * 3600.0


def fill(made: Path) -> None:
    (made / "program").write_bytes(b"program" * 1000)
    (made / "inner").mkdir()
    (made / "inner" / "constants").write_bytes(b"constants")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "kept" / "one"
    sealed.make(made, fill)
    return made


def test_what_was_made_is_whole(folder: Path) -> None:
    assert sealed.fault_in(folder) is None
    assert (folder / "inner" / "constants").read_bytes() == b"constants"
    assert [each.name for each in folder.parent.iterdir()] == ["one"]


def test_what_was_never_made_is_not_there(tmp_path: Path) -> None:
    assert sealed.fault_in(tmp_path / "nothing") == f"{tmp_path / 'nothing'} is not there"
    (tmp_path / "file").write_text("")
    assert sealed.fault_in(tmp_path / "file") == f"{tmp_path / 'file'} is no folder"


@pytest.mark.parametrize("name", ["program", "inner/constants"])
def test_every_bit_counts(folder: Path, name: str) -> None:
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    assert sealed.fault_in(folder) == f"{folder / name} is damaged: its checksum differs"


def test_another_length_is_told_in_bytes(folder: Path) -> None:
    os.truncate(folder / "program", 6999)
    assert sealed.fault_in(folder) == f"{folder / 'program'} is damaged: it has 6999 bytes, not 7000"


def listing(name: str, sha256: object = "") -> str:
    return json.dumps({name: {"size": 7000, "modified": 0, "sha256": sha256}})


NO_LISTS = ("", "{", "[]", "{}", "null", '{"program": 1}', '{"program": {}}', '{"program": {"size": 1}}', "[" * 10**5)
LIES = (listing("../one/program"), listing("/etc/passwd"), listing("program", 5), listing("a\0b"), listing(""))


@pytest.mark.parametrize("text", NO_LISTS + LIES)
def test_a_list_that_is_none_is_damage_too(folder: Path, text: str) -> None:
    (folder / sealed.SUMS).write_text(text)
    assert (sealed.fault_in(folder) or "").startswith(str(folder))


def test_size_and_time_vouch_for_a_file_where_they_are_asked_to(folder: Path) -> None:
    found = (folder / "program").stat()
    (folder / "program").write_bytes(b"PROGRAM" * 1000)
    assert sealed.fault_in(folder, trust_times=True) is not None
    os.utime(folder / "program", ns=(found.st_atime_ns, found.st_mtime_ns))
    assert sealed.fault_in(folder, trust_times=True) is None, "what has size and time of the one that was written"
    assert sealed.fault_in(folder) is not None


def test_files_of_other_times_are_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(folder / "program", (1, 1))
    assert sealed.fault_in(folder, trust_times=True) is None
    monkeypatch.setattr(sealed, "sha256_of", lambda file: pytest.fail(f"{file} is read again"))
    assert sealed.fault_in(folder, trust_times=True) is None


@pytest.mark.parametrize(
    "spoil", [lambda folder: os.truncate(folder / "program", 1), lambda folder: (folder / sealed.SUMS).unlink()]
)
def test_a_damaged_one_is_replaced(folder: Path, spoil: Callable[[Path], object]) -> None:
    spoil(folder)
    sealed.make(folder, fill)
    assert sealed.fault_in(folder) is None
    assert [each.name for each in folder.parent.iterdir()] == ["one"]


def test_a_file_in_its_place_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("a file")
    sealed.make(tmp_path / "one", fill)
    assert sealed.fault_in(tmp_path / "one") is None


def test_of_two_makers_the_first_wins(folder: Path) -> None:
    def other(made: Path) -> None:
        (made / "other").write_text("made later")

    sealed.make(folder, other)
    assert not (folder / "other").exists()
    assert sealed.fault_in(folder) is None


def test_a_maker_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(made: Path) -> None:
        fill(made)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        sealed.make(tmp_path / "one", fail)
    assert list(tmp_path.iterdir()) == []


def test_what_killed_makers_left_is_removed_by_the_next_day(folder: Path) -> None:
    old, young, others = (folder.parent / name for name in (".one.abc", ".one.def", ".two.abc"))
    for left in (old, young, others):
        left.mkdir()
        (left / "half").write_text("half")
    long_ago = time.time() - 2 * DAY_S
    os.utime(old, (long_ago, long_ago))
    os.utime(others, (long_ago, long_ago))
    os.truncate(folder / "program", 1)
    sealed.make(folder, fill)
    assert sorted(each.name for each in folder.parent.iterdir()) == [".one.def", ".two.abc", "one"]


def test_all_of_it_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def note(handle: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(Path, "rename", lambda self, to: (done.append("renamed"), rename(self, to)))
    sealed.make(tmp_path / "one", fill)
    before = done[: done.index("renamed")]
    assert {"program", "constants", "inner", "made"} <= set(before)
    assert done[-1] == tmp_path.name


def test_the_list_says_what_everything_is(folder: Path) -> None:
    sums = json.loads((folder / sealed.SUMS).read_text())
    assert sorted(sums) == ["inner/constants", "program"]
    assert sums["program"]["size"] == 7000
