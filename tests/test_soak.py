"""A few of the kills of `make soak`, in seconds; and that a soak finds what it looks for."""

from pathlib import Path

import pytest

from tests import soak
from tests.cli.harness import in_two_lines, make_model
from tests.deaths import at_line
from tests.run_folders import differences


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a soak changes of this process is put back."""
    from medusa_cli.pipeline import tree_fit

    for name in ("COST_REPEATS", "DRAFT_REPEATS"):
        monkeypatch.setattr(tree_fit, name, getattr(tree_fit, name))
    for name in ("MEDUSA_HOME", "MEDUSA_TRACEBACK"):
        monkeypatch.setenv(name, "")


def test_a_run_killed_ten_times_ends_bit_equal_to_an_unbroken_one() -> None:
    tally = soak.soak(soak.KINDS[:1], 10, seed=4, say=print)
    assert tally.faults == []
    assert tally.total >= 10
    assert tally.kills["line"] >= 5


def test_a_soak_notices_a_run_that_learns_something_else_after_a_kill(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from medusa_cli.train.checkpoint import Checkpoints

    # a run that forgets its checkpoints' optimizer would end with other heads
    real = Checkpoints.restore

    def forgetful(self: Checkpoints, state: object) -> int:
        fresh = state.optimizer.state_dict()  # type: ignore[attr-defined]
        step = real(self, state)  # type: ignore[arg-type]
        state.optimizer.load_state_dict(fresh)  # type: ignore[attr-defined]
        return step

    monkeypatch.setattr(Checkpoints, "restore", forgetful)
    make_model(tmp_path / "model")
    one = soak.Soak(soak.KINDS[0], tmp_path, 4, soak.Tally(), print)
    one.prepare()
    assert one.tally.faults == []
    lines = {site: count for site, count in one.watched.lines.items() if site[0].endswith("train/loop.py")}
    often = max(lines, key=lambda site: lines[site])
    # past the first checkpoint
    one.run([at_line(often, lines[often] * 3 // 4, frozenset(one.watched.codes))])
    assert any("train.jsonl differs" in fault for fault in one.tally.faults)


def test_folders_that_differ_are_told_by_file(tmp_path: Path) -> None:
    for name, text in (("one", "{}"), ("other", "[]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(text)
    (tmp_path / "other" / ".run.json.12.part").write_text("")
    wrong = differences(tmp_path / "one", tmp_path / "other", exact=True)
    assert wrong == ["files differ: ['.run.json.12.part']", "run.json differs"]


def test_a_refused_run_must_say_so_in_two_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tally = soak.Tally()
    one = soak.Soak(soak.KINDS[0], tmp_path, 0, tally, print)
    answers = iter([soak.Ended(1, "error: full\nTraceback")])
    monkeypatch.setattr(soak, "attempt", lambda *_: next(answers))
    assert len(one.run([soak.when_full(9)])) == 1
    assert "the last start ended with 1: error: full" in tally.faults[0]
    assert in_two_lines("step 3\nerror: can't write: I/O error: full\n hint: free some space\n")
    assert not in_two_lines("error: full\nerror: full\n hint: free some space\n")
