"""A bench that was stopped goes on where it stopped, on the same machine and settings alone, and loses nothing."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from medusa_cli.bench import resume
from medusa_cli.bench.document import Report
from medusa_cli.bench.origin import Origin
from medusa_cli.bench.resume import BenchFolder, KeptTrials
from medusa_cli.bench.run import Trial, run_bench
from medusa_cli.errors import FormatError, MedusaError
from tests.bench.fakes_bench import FakeArm, FakeClock, plan, prompts, reply
from tests.tools.test_docs_page import write_result

ASKED = {"model": "tiny", "prompts": "abc", "arms": ["greedy"]}
ON = {"runner": "eager", "fingerprint": "f"}
ORIGIN = Origin("2026-11-30T10:00:00+00:00", "a machine", {"torch": "2"}, "medusa bench")


class Stopped(BaseException):
    """As a kill would end a run."""


def _measure(folder: Path, stop_after: int | None = None, repeats: int = 2) -> tuple[list[Trial], list[str]]:
    """A bench of two arms on three prompts, ended before call number `stop_after`; its trials and its calls."""
    clock, calls = FakeClock(), []

    def answer(ids: tuple[int, ...]):
        if stop_after is not None and len(calls) > stop_after:
            raise Stopped
        return reply([ids[0] - 98], 3, draft_depth=2, time_split={"draft": 0.25})

    arms = [FakeArm(name, clock, answer, seconds, calls) for name, seconds in (("medusa", 1.0), ("greedy", 2.0))]
    rows = prompts(3)
    memory = KeptTrials(folder, rows, [arm.name for arm in arms])
    try:
        trials = run_bench(arms, rows, plan(1, repeats), clock, lambda done, total: None, memory)
    except Stopped:
        trials = []
    return trials, [name for name, _ in calls]


def test_a_run_that_was_stopped_goes_on_and_ends_with_what_a_whole_one_has(tmp_path: Path) -> None:
    whole, calls = _measure(tmp_path)
    (tmp_path / "trials.jsonl").unlink()
    # two to warm up, two batches of two, and one arm of the third
    _, before = _measure(tmp_path, stop_after=7)
    trials, after = _measure(tmp_path)
    assert trials == whole
    assert len(calls) == 2 + 12
    assert len(before) == 8
    assert len(after) == 2 + 8, "warm again, then the batches that not every arm had written"


def test_a_finished_run_is_not_run_again_not_even_to_warm_up(tmp_path: Path) -> None:
    whole, _ = _measure(tmp_path)
    again, calls = _measure(tmp_path)
    assert again == whole
    assert calls == []


def test_a_line_that_a_kill_cut_off_is_measured_again(tmp_path: Path) -> None:
    whole, _ = _measure(tmp_path)
    file = tmp_path / "trials.jsonl"
    content = file.read_bytes()
    file.write_bytes(content[:-20])
    trials, calls = _measure(tmp_path)
    assert trials == whole
    assert len(calls) == 2 + 2
    assert file.read_bytes() == content


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b'{"repeat": 0}',
        b'{"repeat": 0, "batch": 0, "trials": [{"arm": "a", "prompt": "nobody"}]}',
        b"\xff",
        b"[" * 100_000,
    ],
)
def test_a_line_that_is_no_batch_is_named(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "trials.jsonl").write_bytes(line + b"\n")
    with pytest.raises(FormatError, match="line 1 is no batch") as caught:
        KeptTrials(tmp_path, prompts(1), [])
    assert "delete that line" in caught.value.hint


@pytest.mark.parametrize(
    "change",
    [
        {"arm": "another"},
        {"token_ids": None},
        {"token_ids": ["w"]},
        {"kept": None},
        {"num_steps": "many"},
        {"time_split": None},
        {"duration": float("nan")},
        {"share": -1.0},
        {"time_split": {"draft": float("inf")}},
    ],
)
def test_a_reply_that_was_spoilt_is_told_in_one_line_and_stays(tmp_path: Path, change: dict[str, object]) -> None:
    _measure(tmp_path)
    file = tmp_path / "trials.jsonl"
    first, *rest = file.read_text().splitlines()
    batch = json.loads(first)
    batch["trials"][0].update(change)
    file.write_text("\n".join([json.dumps(batch), *rest]) + "\n")
    spoilt = file.read_bytes()
    with pytest.raises(FormatError, match="line 1 is no batch") as caught:
        _measure(tmp_path)
    assert "\n" not in caught.value.message
    assert file.read_bytes() == spoilt


def test_a_batch_that_lacks_an_arm_is_told(tmp_path: Path) -> None:
    _measure(tmp_path)
    (tmp_path / "trials.jsonl").write_text('{"repeat": 0, "batch": 0, "trials": []}\n')
    with pytest.raises(FormatError, match="not every arm of greedy, medusa"):
        _measure(tmp_path)


@pytest.mark.parametrize(
    "change", [{"asked": None}, {"asked": []}, {"on": None}, {"origin": None}, {"origin": {}}, {"origin": {"date": 3}}]
)
def test_a_mark_that_was_spoilt_is_told_in_one_line(tmp_path: Path, change: dict[str, object]) -> None:
    _claimed(tmp_path)
    file = tmp_path / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(FormatError, match="is no mark of a bench") as caught:
        BenchFolder(tmp_path, ASKED)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("report", [{"a": 1}, {"arms": []}, {"arms": {}, "verdict": None}])
def test_a_report_that_was_spoilt_is_told(tmp_path: Path, report: dict[str, object]) -> None:
    folder = _claimed(tmp_path)
    (folder.path / "bench.json").write_text(json.dumps(report))
    with pytest.raises(FormatError, match="is no report of a bench") as caught:
        assert folder.report
    assert "delete it" in caught.value.hint


def test_a_disk_that_is_full_leaves_the_whole_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _measure(tmp_path, repeats=1)
    content = (tmp_path / "trials.jsonl").read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(resume.os, "fsync", full)
    with pytest.raises(MedusaError, match="No space left on device") as caught:
        _measure(tmp_path)
    assert "goes on" in caught.value.hint
    assert (tmp_path / "trials.jsonl").read_bytes() == content


def _claimed(path: Path) -> BenchFolder:
    folder = BenchFolder(path, ASKED)
    folder.claim(ON, ORIGIN)
    return folder


def test_a_folder_goes_on_from_its_own_beginning(tmp_path: Path) -> None:
    _claimed(tmp_path / "b")
    later = Origin("2026-12-01T00:00:00+00:00", ORIGIN.machine, ORIGIN.versions, "medusa bench -q")
    assert BenchFolder(tmp_path / "b", ASKED).claim(ON, later) == ORIGIN


@pytest.mark.parametrize(
    ("again", "named"),
    [
        (lambda path: BenchFolder(path, {**ASKED, "prompts": "other"}), "prompts"),
        (lambda path: BenchFolder(path, {**ASKED, "model": "m", "arms": []}), "model, arms"),
        (lambda path: BenchFolder(path, ASKED).claim({**ON, "fingerprint": "g"}, ORIGIN), "fingerprint"),
        (
            lambda path: BenchFolder(path, ASKED).claim(ON, Origin(ORIGIN.date, "another", ORIGIN.versions, "")),
            "machine",
        ),
    ],
)
def test_other_settings_or_another_machine_are_refused_by_name(
    tmp_path: Path, again: Callable[[Path], object], named: str
) -> None:
    _claimed(tmp_path / "b")
    with pytest.raises(MedusaError, match=f"is a bench with other settings: {named}$") as caught:
        again(tmp_path / "b")
    assert "--output-dir" in caught.value.hint


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("words")
    with pytest.raises(MedusaError, match="holds something else"):
        BenchFolder(tmp_path, ASKED)
    (tmp_path / "file").write_text("")
    with pytest.raises(MedusaError, match="can't write"):
        BenchFolder(tmp_path / "file", ASKED)


def test_a_run_that_was_killed_while_the_model_loaded_begins_again(tmp_path: Path) -> None:
    with BenchFolder(tmp_path / "b", ASKED).to_itself():
        pass
    assert BenchFolder(tmp_path / "b", {**ASKED, "model": "other"}).report is None


def test_two_runs_at_once_don_t_share_a_folder(tmp_path: Path) -> None:
    first, second = BenchFolder(tmp_path / "b", ASKED), BenchFolder(tmp_path / "b", ASKED)
    with first.to_itself(), pytest.raises(MedusaError, match="another bench is writing"), second.to_itself():
        pass


def test_the_report_of_a_run_that_ended_is_found(tmp_path: Path) -> None:
    folder = _claimed(tmp_path / "b")
    assert folder.report is None
    report = _report(tmp_path)
    report["run"]["contention"] = {"waiting": 0.4, "stolen": None, "load_average": 2.5, "cores": 2, "busy": True}
    folder.finish(Report.model_validate(report))
    found = BenchFolder(tmp_path / "b", ASKED).report
    assert found is not None
    assert json.dumps(found.document()) == json.dumps(report), "no figure is lost"
    (tmp_path / "b" / "bench.json").write_text("{")
    with pytest.raises(FormatError, match="bench.json can't be read"):
        assert folder.report


def _report(folder: Path) -> dict[str, Any]:
    return json.loads(write_result(folder / "a.json", {"medusa": 1.0, "greedy": 2.0}).read_text())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["verdict"], None), (["speedup"], []), (["speedup", "greedy"], "two"), (["speedup_spread"], {}),
        (["arms"], {}),
        (["identical"], {"greedy": [4, 4]}), (["arms", "greedy", "latency_ms"], [1.0]), (["arms", "medusa"], 7),
        (["arms", "greedy", "spec_decode_num_drafts"], 10**400), (["arms", "greedy", "duration"], float("nan")),
        (["arms", "greedy", "categories"], {}), (["divergences"], [None]),
    ],
)  # fmt: skip
def test_a_report_with_other_types_within_is_refused_by_their_place(tmp_path: Path, path: list, value: Any) -> None:
    folder, report = _claimed(tmp_path / "b"), _report(tmp_path)
    holder = functools.reduce(lambda at, name: at[name], path[:-1], report)
    holder[path[-1]] = value
    (folder.path / "bench.json").write_text(json.dumps(report))
    with pytest.raises(FormatError, match="bench.json is no report of a bench: ") as caught:
        assert folder.report
    assert "delete it" in caught.value.hint


def test_what_is_kept_is_plain_json(tmp_path: Path) -> None:
    _measure(tmp_path, repeats=1)
    rows = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert [(row["repeat"], row["batch"], len(row["trials"])) for row in rows] == [(0, 0, 2), (0, 1, 2), (0, 2, 2)]
    assert rows[0]["trials"][0]["time_split"] == {"draft": 0.25}
