"""`medusa inspect-tree` as a user meets it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from medusa_cli.cli import inspect_tree
from medusa_cli.errors import FormatError, MedusaError, TreeError
from medusa_cli.formats import places
from medusa_cli.trees.build import best_tree, expected_tokens
from medusa_cli.trees.files import read_tree, write_tree

ACCURACY_KR = [[0.5, 0.2, 0.1, 0.05], [0.4, 0.2, 0.1, 0.05], [0.3, 0.1, 0.1, 0.05]]


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    folder = tmp_path / "heads"
    folder.mkdir()
    facts = {"num_heads": 3, "num_ranks": 4, "plain": ACCURACY_KR, "conditional": ACCURACY_KR}
    (folder / "accuracy.json").write_text(json.dumps({**facts, "positions": 1234, "source": "dev prompts"}))
    write_tree(folder / "tree.json", best_tree(ACCURACY_KR, 8), {})
    return folder


def _with_cost(heads: Path, cost: dict[int, float]) -> None:
    (heads / "provenance.json").write_text(json.dumps({"step_cost": cost}))


def _run(*args: object) -> Any:
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command("inspect-tree")(inspect_tree.command)
    result = CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "80"})
    if isinstance(result.exception, MedusaError):
        raise result.exception
    return result


def _out(*args: object) -> str:
    result = _run(*args)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_tree_of_the_heads_is_drawn_with_its_counts_and_its_budget(heads: Path) -> None:
    out = _out("--heads", heads)
    assert "8 nodes, 9 with the root" in out
    assert "├─ [0]" in out
    assert "Measured on 1,234 positions of dev prompts" in " ".join(out.split())
    assert f"{expected_tokens(best_tree(ACCURACY_KR, 16), ACCURACY_KR):.2f}" in out
    assert max(len(line) for line in out.splitlines()) <= 80


def test_without_a_measured_cost_it_says_so_and_predicts_nothing(heads: Path) -> None:
    out = _out("--heads", heads)
    assert "No step cost was measured" in out
    assert "speed-up  " not in out
    document = json.loads(_out("--heads", heads, "--json"))
    assert document["prediction"] is None
    assert document["choice"] is None
    assert [row["speedup"] for row in document["budget"]] == [None] * 6


def test_with_a_measured_cost_it_predicts_the_speed_up(heads: Path) -> None:
    _with_cost(heads, {1: 0.04, 64: 0.08})
    out = _out("--heads", heads)
    assert "nodes pay best" in out
    document = json.loads(_out("--heads", heads, "--json"))
    assert [row["size"] for row in document["budget"]] == [0, 4, 8, 16, 32, 64]
    assert document["budget"][0] == {"size": 0, "expected_tokens": 1.0, "cost_ratio": 1.0, "speedup": 1.0}
    best = document["choice"]
    assert best["speedup"] == pytest.approx(best["expected_tokens"] / best["cost_ratio"])


def test_a_steep_cost_is_told_as_no_tree_pays(heads: Path) -> None:
    _with_cost(heads, {1: 0.04, 64: 64 * 0.04})
    assert "No tree pays at this step cost: plain decoding is faster." in _out("--heads", heads)


def test_the_document_counts_the_rows_of_the_mask(heads: Path) -> None:
    document = json.loads(_out("--heads", heads, "--json"))
    assert document["tree"]["num_nodes_with_root"] == read_tree(heads).ancestors_XNN.shape[1] == 9
    assert len(document["tree"]["nodes"]) == document["tree"]["num_nodes"] == 8


def test_a_size_fits_the_best_tree_of_that_size(heads: Path) -> None:
    document = json.loads(_out("--heads", heads, "--tree-size", 5, "--json"))
    assert sorted(map(tuple, document["tree"]["paths"])) == sorted(best_tree(ACCURACY_KR, 5).paths())
    assert "0 nodes, 1 with the root; depth 0" in _out("--heads", heads, "--tree-size", 0)


def test_a_tree_deeper_than_the_heads_is_refused(heads: Path) -> None:
    with pytest.raises(TreeError, match=r"path \[0, 0, 0, 0\] needs head 4; 3 present"):
        _run("--heads", heads, "--tree", "chain:5")


def test_a_tree_without_heads_is_drawn_without_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "SHIPPED", tmp_path)
    out = _out("--tree", "2x2")
    assert "6 nodes, 7 with the root; depth 2 (2 + 4 nodes by depth)" in out
    assert "No accuracies were measured" in out
    with pytest.raises(TreeError, match="no tree is named and no heads"):
        _run()
    with pytest.raises(TreeError, match="no tree is named and no heads"):
        _run("--tree-size", 4)


def test_without_heads_named_the_shipped_ones_are_shown(
    heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(heads, tmp_path / "shipped" / "some-model" / "medusa")
    (tmp_path / "shipped" / "some-model" / "medusa" / "heads.json").write_text("{}")
    monkeypatch.setattr(places, "SHIPPED", tmp_path / "shipped")
    assert "8 nodes, 9 with the root" in _out("--model", "some-model")
    with pytest.raises(TreeError, match="no tree is named and no heads"):
        _out("--model", "other-model")


def test_heads_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no heads at .*: no such folder"):
        _run("--heads", tmp_path / "nothing")
    with pytest.raises(FormatError, match=r"accuracy\.json is missing"):
        _run("--heads", tmp_path)


@pytest.mark.parametrize("format", ["json", "medusa-choices"])
def test_what_is_printed_can_be_read_as_a_tree_again(heads: Path, tmp_path: Path, format: str) -> None:
    file = tmp_path / "again"
    file.write_text(_out("--heads", heads, "--format", format))
    assert read_tree(file).paths() == read_tree(heads).paths()


@pytest.mark.parametrize(("name", "start"), [("t.svg", b"<svg"), ("t.dot", b"digraph"), ("t.txt", b"tree of")])
def test_the_name_of_the_output_says_how_to_draw(heads: Path, tmp_path: Path, name: str, start: bytes) -> None:
    result = _run("--heads", heads, "-o", tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)
    assert result.stdout == ""
    assert result.stderr == f"wrote {tmp_path / name}\n"


def test_a_png_is_written_to_a_file(heads: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    _run("--heads", heads, "--format", "png", "-o", tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_an_output_that_cannot_be_written_is_named(heads: Path, tmp_path: Path) -> None:
    with pytest.raises(MedusaError, match="can't write"):
        _run("--heads", heads, "-o", tmp_path / "no" / "folder.svg")


def test_the_document_goes_to_a_file_as_well(heads: Path, tmp_path: Path) -> None:
    out = _out("--heads", heads, "--json", "--output-json", tmp_path / "t.json")
    assert json.loads(out) == json.loads((tmp_path / "t.json").read_text())


def test_two_trees_are_compared_by_depth_gain_and_nodes(heads: Path) -> None:
    out = _out("--heads", heads, "--compare", "chain:3", "2x1")
    assert "nodes with the root              4         5" in out
    assert "nodes at depth 3                 1         0" in out
    assert "only in A: 1  [0,0,0]" in out
    assert "only in B: 2  [1] [1,0]" in out
    document = json.loads(_out("--heads", heads, "--compare", "chain:3", heads, "--json"))
    assert document["only_in_a"] == []
    assert document["a"]["tree"]["expected_tokens"] == pytest.approx(1 + 0.5 + 0.2 + 0.06)


@pytest.mark.parametrize(
    "args",
    [
        ["--tree", "none", "--tree-size", "4"],
        ["--compare", "none", "none", "--tree", "none"],
        ["--compare", "none", "none", "--format", "svg"],
        ["--compare", "none"],
        ["--tree", "none", "--format", "png"],
        ["--tree", "none", "--json", "--format", "dot"],
        ["--tree-size", "-1"],
        ["--format", "gif"],
    ],
)
def test_flags_that_contradict_each_other_are_a_usage_error(args: list[str]) -> None:
    result = _run(*args)
    assert result.exit_code == 2
    assert result.stdout == ""


def test_neither_the_command_nor_the_drawings_import_torch_before_they_run() -> None:
    code = "import sys, medusa_cli.cli.inspect_tree; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
