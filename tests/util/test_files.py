"""Whole files: writers that share a process id don't meet, and what a killed one leaves is known by its name."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from medusa_cli.util.files import is_part_of, parts_beside, parts_in, write_atomically


def test_writers_of_one_process_id_leave_a_whole_file_at_every_moment(tmp_path: Path) -> None:
    file, texts = tmp_path / "one.json", [letter * 200_000 for letter in "abcd"]
    write_atomically(file, texts[0])

    def write(text: str) -> None:
        for _ in range(20):
            write_atomically(file, text)

    with ThreadPoolExecutor(len(texts)) as pool:
        writers = [pool.submit(write, text) for text in texts]
        while not all(writer.done() for writer in writers):
            assert file.read_text() in texts
    for writer in writers:
        writer.result()
    assert [*tmp_path.iterdir()] == [file]


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file whose writer died before it could give it the name."""
    file = tmp_path / "run.json"
    file.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *names: (_ for _ in ()).throw(KeyboardInterrupt))
        patch.setattr(Path, "unlink", lambda *given, **how: None)
        with pytest.raises(KeyboardInterrupt):
            write_atomically(file, "new")
    return file


def test_what_a_killed_writer_leaves_is_found_by_its_name(killed: Path) -> None:
    (left,) = parts_beside(killed)
    assert parts_in(killed.parent) == [left]
    assert left.read_text() == "new"
    assert killed.read_text() == "old"
    assert not is_part_of(left, killed.with_name("other.json"))
    assert not is_part_of(left, killed.parent / "deeper" / killed.name)


@pytest.mark.parametrize(
    "name",
    [".run.json.12.part", ".run.json.part", "run.json.0123456789abcdef.medusa-part", ".run.json.0123.medusa-part",
     ".run.json.0123456789abcdef.medusa-part.jpg", ".photo.run.json.0123456789abcdef.medusa-part", "run.json"],
)  # fmt: skip
def test_a_file_of_somebody_else_is_no_part(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("a photo")
    assert parts_beside(tmp_path / "run.json") == []


def test_a_writer_that_fails_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.json"
    write_atomically(file, "old")
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write_atomically(file, "new")
    assert file.read_text() == "old"
    assert [*tmp_path.iterdir()] == [file]


def test_the_mode_is_what_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "one", b"1")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "one").stat().st_mode) == 0o640


def test_a_link_that_somebody_planted_is_not_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda count: "0" * 2 * count)
    (tmp_path / ".one.0000000000000000.medusa-part").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "one", b"1")
    assert not (tmp_path / "elsewhere").exists()
