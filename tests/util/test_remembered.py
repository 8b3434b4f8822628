"""Facts are found again under their own key alone, checked when they are read, doubted when they may be wrong."""

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from medusa_cli.util import remembered
from medusa_cli.util.remembered import every, forget, recall, remember, revise
from tests.strangers import STRANGER, as_root

KEY = {"fingerprint": "abc", "threads": "2"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def number(value: Any) -> int:
    """What the facts of these tests are."""
    found = value["n"]
    if not isinstance(found, int):
        raise ValueError("no number")
    return found


def file_of(home: Path) -> Path:
    (file,) = home.glob("remembered/things/*.json")
    return file


def known() -> int | None:
    fact = recall("things", KEY, number)
    return None if fact is None else fact.value


def test_a_fact_is_found_under_its_key_whatever_the_order_of_its_parts() -> None:
    remember("things", KEY, {"n": 3})
    fact = recall("things", dict(reversed(KEY.items())), number)
    assert fact is not None
    assert (fact.value, fact.disturbed) == (3, False)
    assert timedelta(0) <= fact.age < timedelta(minutes=1)


@pytest.mark.parametrize("change", [{"threads": "3"}, {"fingerprint": "abd"}, {"more": "1"}])
def test_another_key_is_another_fact(change: dict[str, str]) -> None:
    remember("things", KEY, {"n": 3})
    assert recall("things", {**KEY, **change}, number) is None
    assert recall("others", KEY, number) is None


def test_a_file_that_was_moved_to_another_key_s_place_is_not_believed(home: Path) -> None:
    remember("things", KEY, {"n": 3})
    theirs = file_of(home)
    remember("things", {**KEY, "threads": "8"}, {"n": 8})
    (other,) = set(home.glob("remembered/things/*.json")) - {theirs}
    other.replace(theirs)
    assert known() is None


@pytest.mark.parametrize(
    "spoilt",
    [
        "", "{", "[]", "1", "null", "[" * 100_000, json.dumps({"key": KEY, "value": {"n": 1}, "disturbed": False}),
        json.dumps({"key": KEY, "value": {"n": "1"}, "disturbed": False, "at": "2030-01-01T00:00:00+00:00"}),
        json.dumps({"key": {"a": 1}, "value": {"n": 1}, "disturbed": False, "at": "2030-01-01T00:00:00+00:00"}),
        json.dumps({"key": KEY, "value": {"n": 1}, "disturbed": False, "at": "2030-01-01T00:00:00"}),
        json.dumps({"key": KEY, "value": {"n": 1}, "disturbed": 0, "at": "2030-01-01T00:00:00+00:00"}),
    ],
)  # fmt: skip
def test_a_spoilt_file_is_no_fact_and_is_written_anew(home: Path, spoilt: str) -> None:
    remember("things", KEY, {"n": 3})
    file_of(home).write_text(spoilt)
    assert known() is None
    assert list(every("things", number)) == []
    revise("things", KEY, number, lambda fact: {"n": 9})
    assert known() is None
    remember("things", KEY, {"n": 4})
    assert known() == 4


def test_what_only_we_can_have_written_is_read(home: Path) -> None:
    before = os.umask(0o002)
    try:
        remember("things", KEY, {"n": 3})
    finally:
        os.umask(before)
    file = file_of(home)
    assert known() == 3, "ours, whatever the umask"
    file.chmod(0o666)
    assert known() == 3, "nobody else enters the folder"


def test_what_a_link_leads_to_is_not_read(home: Path, tmp_path: Path) -> None:
    remember("things", KEY, {"n": 3})
    file = file_of(home)
    linked = tmp_path / "elsewhere.json"
    file.rename(linked)
    file.symlink_to(linked)
    assert known() is None, "a link may lead to what others write"


@as_root
def test_a_fact_of_somebody_else_is_not_read(home: Path) -> None:
    remember("things", KEY, {"n": 3})
    os.chown(file_of(home), STRANGER, -1)
    assert known() is None


def test_what_a_busy_moment_found_holds_for_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    remember("things", KEY, {"n": 3}, disturbed=True)
    fact = recall("things", KEY, number)
    assert fact is not None
    assert fact.disturbed
    monkeypatch.setattr(remembered, "FRESH", timedelta(seconds=-1))
    assert known() is None
    assert list(every("things", number)) == []


def test_a_fact_from_a_busy_moment_in_the_future_does_not_hold(home: Path) -> None:
    remember("things", KEY, {"n": 3}, disturbed=True)
    later = datetime.now(UTC) + timedelta(days=3)
    file_of(home).write_text(json.dumps({**json.loads(file_of(home).read_text()), "at": later.isoformat()}))
    assert known() is None


def test_a_correction_starts_from_what_another_process_wrote_meanwhile() -> None:
    remember("things", KEY, {"n": 3})
    revise("things", KEY, number, lambda fact: {"n": fact.value + 1})
    remember("things", KEY, {"n": 10})
    revise("things", KEY, number, lambda fact: {"n": fact.value + 1})
    assert known() == 11
    revise("things", KEY, number, lambda fact: None)
    assert known() is None
    revise("things", KEY, number, lambda fact: {"n": 5})
    assert known() is None, "nothing is made of nothing"


def test_a_correction_makes_a_fact_no_younger_and_no_surer(home: Path) -> None:
    remember("things", KEY, {"n": 3}, disturbed=True)
    before = json.loads(file_of(home).read_text())
    revise("things", KEY, number, lambda fact: {"n": 4})
    assert json.loads(file_of(home).read_text()) == {**before, "value": {"n": 4}}


def test_the_newest_comes_first_and_what_is_forgotten_is_gone(home: Path) -> None:
    remember("things", KEY, {"n": 1})
    old = json.loads(file_of(home).read_text())
    file_of(home).write_text(json.dumps({**old, "at": "2020-01-01T00:00:00+00:00"}))
    remember("things", {**KEY, "threads": "9"}, {"n": 2})
    assert [fact.value for fact in every("things", number)] == [2, 1]
    forget("things", KEY)
    forget("things", KEY)
    assert [fact.value for fact in every("things", number)] == [2]


def test_a_home_that_takes_no_files_is_no_error(home: Path) -> None:
    home.write_text("")
    remember("things", KEY, {"n": 1})
    forget("things", KEY)
    assert known() is None
    assert list(every("things", number)) == []
