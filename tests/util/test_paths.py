"""The home is a place that nobody else can write to: made so, asked for at every use, left out with a word if not."""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from medusa_cli.errors import MedusaError
from medusa_cli.util import paths
from medusa_cli.util.paths import cache_home, why_not_private
from tests.strangers import STRANGER, as_root


@pytest.fixture(autouse=True)
def user(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of a user, with nothing set but HOME; the list of users names another."""
    for name in ("MEDUSA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(paths, "_listed_home", lambda: str(open_folder / "listed" / ".cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(open_folder / "temporary"))
    folder = open_folder / "user"
    folder.mkdir(mode=0o755)
    monkeypatch.setenv("HOME", str(folder))
    return folder


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_home_and_what_lacks_above_it_is_made_for_this_user_alone(user: Path) -> None:
    before = os.umask(0o002)
    try:
        assert cache_home() == user / ".cache" / "medusa"
    finally:
        os.umask(before)
    assert mode_of(cache_home()) == mode_of(user / ".cache") == 0o700


def test_a_home_that_an_earlier_version_left_open_is_closed(user: Path, said: pytest.LogCaptureFixture) -> None:
    left = user / ".cache" / "medusa"
    left.mkdir(parents=True)
    left.chmod(0o775)
    assert cache_home() == left
    assert mode_of(left) == 0o700
    assert not said.messages


def test_a_relative_cache_folder_is_ignored(user: Path, open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(open_folder)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert cache_home() == user / ".cache" / "medusa"
    assert not (open_folder / "cache").exists()


def test_a_relative_home_of_the_user_is_ignored(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(open_folder)
    monkeypatch.setenv("HOME", "user")
    assert cache_home() == open_folder / "listed" / ".cache" / "medusa"


def test_a_relative_home_of_ours_is_refused_with_the_whole_path(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(open_folder)
    monkeypatch.setenv("MEDUSA_HOME", "kept")
    with pytest.raises(MedusaError, match="code is run from it") as caught:
        cache_home()
    assert f"MEDUSA_HOME={open_folder / 'kept'}" in caught.value.hint


def test_a_link_is_followed_once(user: Path, open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (open_folder / "disk").mkdir()
    (user / "link").symlink_to(open_folder / "disk")
    monkeypatch.setenv("MEDUSA_HOME", str(user / "link" / "home"))
    assert cache_home() == open_folder / "disk" / "home"


def test_a_link_that_leads_to_itself_is_a_place_that_takes_no_files(
    user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (user / "loop").symlink_to(user / "loop")
    monkeypatch.setenv("MEDUSA_HOME", str(user / "loop"))
    with pytest.raises(OSError, match="symbolic links"):
        (cache_home() / "file").write_text("")


def test_a_named_home_keeps_its_mode(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (open_folder / "mine").mkdir(mode=0o755)
    monkeypatch.setenv("MEDUSA_HOME", str(open_folder / "mine"))
    assert cache_home() == open_folder / "mine"
    assert mode_of(open_folder / "mine") == 0o755


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o775])
@pytest.mark.parametrize("above", [False, True])
def test_a_home_that_others_may_write_is_left_out_with_one_line(
    user: Path,
    open_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: pytest.LogCaptureFixture,
    mode: int,
    above: bool,
) -> None:
    shared = open_folder / "shared"
    shared.mkdir()
    shared.chmod(mode)
    monkeypatch.setattr(paths, "_is_own_group", lambda number: False)
    named = shared / "home" if above else shared
    monkeypatch.setenv("MEDUSA_HOME", str(named))
    assert cache_home() == cache_home() == user / ".cache" / "medusa"
    (line,) = said.messages
    assert line == f"{named} isn't used, for others may write to {shared}; {user / '.cache' / 'medusa'} is used instead"


def test_a_folder_of_this_users_own_group_is_private(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "_is_own_group", lambda number: True)
    (open_folder / "mine").mkdir()
    (open_folder / "mine").chmod(0o775)
    assert why_not_private(open_folder / "mine") is None


def test_in_a_sticky_folder_what_is_ones_own_is_private(open_folder: Path) -> None:
    (open_folder / "everyone").mkdir()
    (open_folder / "everyone").chmod(0o1777)
    (open_folder / "everyone" / "mine").mkdir(mode=0o700)
    assert why_not_private(open_folder / "everyone" / "mine") is None
    assert why_not_private(open_folder / "everyone" / "not yet there") is None


def test_what_lies_in_a_folder_that_others_cant_enter_is_private(open_folder: Path) -> None:
    inner = open_folder / "closed" / "open"
    inner.mkdir(parents=True)
    inner.chmod(0o777)
    assert why_not_private(inner) == f"others may write to {inner}"
    inner.parent.chmod(0o700)
    assert why_not_private(inner) is None


@as_root
def test_a_home_of_somebody_else_is_left_out(user: Path, open_folder: Path, said: pytest.LogCaptureFixture) -> None:
    os.chown(user, STRANGER, STRANGER)
    assert cache_home() == open_folder / "listed" / ".cache" / "medusa"
    (line,) = said.messages
    assert f"{user} belongs to user {STRANGER}" in line


@as_root
def test_where_no_place_is_private_the_hint_says_what_to_set(open_folder: Path) -> None:
    os.chown(open_folder, STRANGER, STRANGER)
    with pytest.raises(MedusaError, match=f"{open_folder} belongs to user {STRANGER}") as caught:
        cache_home()
    assert "MEDUSA_HOME" in caught.value.hint


def test_what_belongs_to_the_system_is_private() -> None:
    assert why_not_private(Path("/usr/lib")) is None
