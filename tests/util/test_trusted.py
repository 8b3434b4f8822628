"""Files of others, and files that others may write to, are not read; a line says so once."""

import os
from pathlib import Path

import pytest

from medusa_cli.util.trusted import is_private, read_private
from tests.strangers import STRANGER, as_root


@pytest.fixture
def file(open_folder: Path) -> Path:
    written = open_folder / "costs" / "one.json"
    written.parent.mkdir(mode=0o755)
    written.write_bytes(b"{}")
    written.chmod(0o644)
    return written


def test_a_file_of_ones_own_is_read(file: Path, said: pytest.LogCaptureFixture) -> None:
    assert is_private(file)
    assert read_private(file) == b"{}"
    assert not said.messages


@pytest.mark.parametrize("mode", [0o666, 0o646])
def test_a_file_that_others_may_write_is_not_read(file: Path, said: pytest.LogCaptureFixture, mode: int) -> None:
    file.chmod(mode)
    assert read_private(file) is None
    assert not is_private(file)
    assert said.messages == [f"{file} isn't used: others may write to {file}"]


def test_a_file_in_a_folder_that_others_may_write_is_not_read(file: Path, said: pytest.LogCaptureFixture) -> None:
    file.parent.chmod(0o777)
    assert read_private(file) is None
    assert said.messages == [f"{file} isn't used: others may write to {file.parent}"]


@as_root
@pytest.mark.parametrize("which", ["the file", "its folder"])
def test_what_belongs_to_somebody_else_is_not_read(file: Path, said: pytest.LogCaptureFixture, which: str) -> None:
    theirs = file if which == "the file" else file.parent
    os.chown(theirs, STRANGER, STRANGER)
    assert read_private(file) is None
    assert said.messages == [f"{file} isn't used: {theirs} belongs to user {STRANGER}"]


def test_a_link_to_what_others_may_write_is_not_followed(file: Path) -> None:
    file.chmod(0o666)
    (file.parent / "link").symlink_to(file)
    assert not is_private(file.parent / "link")
    assert read_private(file.parent / "link") is None


def test_what_is_not_there_is_nothing_to_tell(file: Path, said: pytest.LogCaptureFixture) -> None:
    file.unlink()
    assert read_private(file) is None
    assert read_private(file / "below") is None
    assert read_private(file.parent) is None
    assert not said.messages


def test_a_pipe_in_its_place_is_no_reason_to_wait(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)
    assert read_private(file) is None
