"""A few damaged files of each kind; `make mutations` reads thousands."""

import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fuzz import mutations
from tests.fuzz.kinds import KINDS
from tests.fuzz.mutations import READ, REFUSED, Done, main, make, read_all
from tests.fuzz.mutator import FORMS, mutated

FEW = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mutations")


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_read_or_refused_in_a_line(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDUSA_HOME", str(folder / "home"))
    bench = make(kind, 1, folder)
    found = {number: bench.read(number) for number in range(FEW)}
    assert not {number: fate for number, fate in found.items() if fate[1] not in (READ, REFUSED)}
    assert REFUSED in {fate for _, fate in found.values()}, "some of the damage is none that can be read"


@pytest.mark.parametrize("form", FORMS)
def test_the_same_seed_does_the_same_damage(form: str) -> None:
    content = json.dumps({"a": [1, {"b": "x"}]}).encode()
    made = [mutated(content, b"[1]", form, random.Random(f"{form} {seed}")) for seed in (*range(50), *range(50))]
    assert made[:50] == made[50:]
    assert len(set(made)) > 25


def test_what_ends_a_process_or_hangs_is_found_and_the_next_file_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(_: Path, victim: str) -> None:
        left = int(Path("../left").read_text())
        Path("../left").write_text(str(left - 1))
        if left == 4:
            os._exit(9)
        if left == 3:
            raise KeyError("no such thing")
        while left == 2:
            pass

    bench = make("tree", 1, folder)
    (bench.copy.parent).mkdir(exist_ok=True)
    (bench.copy.parent / "left").write_text("5")
    monkeypatch.setattr(mutations, "SECONDS", 0.5)
    kept = read_all(replace(bench, kind=replace(bench.kind, read=read)), 5, Done("tree", 1), folder / "kept.json")
    faults = {fault["number"]: fault["fault"] for fault in kept.faults}
    assert [*faults] == [1, 2, 3]
    assert "the process died: exit 9" in faults[1]
    assert "KeyError: 'no such thing'" in faults[2]
    assert "hangs: " in faults[3]
    assert kept.counts == {READ: 2, "faults": 3}


def test_a_run_that_was_stopped_goes_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--kind", "tree", "--folder", str(folder), "--seed", "5"]
    assert main([*asked, "--count", "50"]) == 0
    before = json.loads((folder / "tree-readers.json").read_text())
    assert main([*asked, "--count", "60"]) == 0
    after = json.loads((folder / "tree-readers.json").read_text())
    assert (before["done"], after["done"]) == (50, 60)
    assert all(after["counts"][fate] >= count for fate, count in before["counts"].items())
    assert "tree: 60 files" in capsys.readouterr().out
