"""`medusa inspect-tree` as a user meets it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from medusa_cli.errors import FormatError, MedusaError, TreeError
from medusa_cli.formats import places
from medusa_cli.trees.build import best_tree, expected_tokens
from medusa_cli.trees.files import read_tree
from tests.trees.inspecting import ACCURACY_KR, make_heads, out_of, run


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    return make_heads(tmp_path / "heads")


def test_the_tree_of_the_heads_is_drawn_with_its_counts_and_its_budget(heads: Path) -> None:
    out = out_of("--heads", heads, columns=80)
    assert "8 nodes, 9 with the root" in out
    assert "├─ [0]" in out
    assert "Measured on 1,234 positions of dev prompts" in " ".join(out.split())
    assert f"{expected_tokens(best_tree(ACCURACY_KR, 16), ACCURACY_KR):.2f}" in out
    assert max(len(line) for line in out.splitlines()) <= 80


def test_the_document_counts_the_rows_of_the_mask(heads: Path) -> None:
    document = json.loads(out_of("--heads", heads, "--json"))
    assert document["tree"]["num_nodes_with_root"] == read_tree(heads).ancestors_XNN.shape[1] == 9
    assert len(document["tree"]["nodes"]) == document["tree"]["num_nodes"] == 8


def test_a_size_fits_the_best_tree_of_that_size(heads: Path) -> None:
    document = json.loads(out_of("--heads", heads, "--tree-size", 5, "--json"))
    assert sorted(map(tuple, document["tree"]["paths"])) == sorted(best_tree(ACCURACY_KR, 5).paths())
    assert "0 nodes, 1 with the root; depth 0" in out_of("--heads", heads, "--tree-size", 0)


def test_a_tree_deeper_than_the_heads_is_refused(heads: Path) -> None:
    with pytest.raises(TreeError, match=r"path \[0, 0, 0, 0\] needs head 4; 3 present"):
        run("--heads", heads, "--tree", "chain:5")


def test_a_tree_without_heads_is_drawn_without_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "SHIPPED", tmp_path)
    out = out_of("--tree", "2x2")
    assert "6 nodes, 7 with the root; depth 2 (2 + 4 nodes by depth)" in out
    assert "No accuracies were measured" in out
    with pytest.raises(TreeError, match="no tree is named and no heads"):
        run()
    with pytest.raises(TreeError, match="no tree is named and no heads"):
        run("--tree-size", 4)


def test_without_heads_named_the_shipped_ones_are_shown(
    heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(heads, tmp_path / "shipped" / "some-model" / "medusa")
    (tmp_path / "shipped" / "some-model" / "medusa" / "heads.json").write_text("{}")
    monkeypatch.setattr(places, "SHIPPED", tmp_path / "shipped")
    assert "8 nodes, 9 with the root" in out_of("--model", "some-model")
    with pytest.raises(TreeError, match="no tree is named and no heads"):
        out_of("--model", "other-model")


def test_heads_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no heads at .*: no such folder"):
        run("--heads", tmp_path / "nothing")
    with pytest.raises(FormatError, match=r"accuracy\.json is missing"):
        run("--heads", tmp_path)


@pytest.mark.parametrize("format", ["json", "medusa-choices"])
def test_what_is_printed_can_be_read_as_a_tree_again(heads: Path, tmp_path: Path, format: str) -> None:
    file = tmp_path / "again"
    file.write_text(out_of("--heads", heads, "--format", format))
    assert read_tree(file).paths() == read_tree(heads).paths()


@pytest.mark.parametrize(("name", "start"), [("t.svg", b"<svg"), ("t.dot", b"digraph"), ("t.txt", b"tree of")])
def test_the_name_of_the_output_says_how_to_draw(heads: Path, tmp_path: Path, name: str, start: bytes) -> None:
    result = run("--heads", heads, "-o", tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)
    assert result.stdout == ""
    assert result.stderr == f"wrote {tmp_path / name}\n"


def test_a_png_is_written_to_a_file(heads: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run("--heads", heads, "--format", "png", "-o", tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_an_output_that_cannot_be_written_is_named(heads: Path, tmp_path: Path) -> None:
    with pytest.raises(MedusaError, match="can't write"):
        run("--heads", heads, "-o", tmp_path / "no" / "folder.svg")


def test_the_document_goes_to_a_file_as_well(heads: Path, tmp_path: Path) -> None:
    out = out_of("--heads", heads, "--json", "--output-json", tmp_path / "t.json")
    assert json.loads(out) == json.loads((tmp_path / "t.json").read_text())


def test_two_trees_are_compared_by_depth_gain_and_nodes(heads: Path) -> None:
    out = out_of("--heads", heads, "--compare", "chain:3", "2x1")
    assert "nodes with the root              4         5" in out
    assert "nodes at depth 3                 1         0" in out
    assert "only in A: 1  [0,0,0]" in out
    assert "only in B: 2  [1] [1,0]" in out
    document = json.loads(out_of("--heads", heads, "--compare", "chain:3", heads, "--json"))
    assert document["only_in_a"] == []
    assert document["a"]["tree"]["expected_tokens"] == pytest.approx(1 + 0.5 + 0.2 + 0.06)


@pytest.mark.parametrize(
    "args",
    [
        ["--tree", "none", "--tree-size", "4"],
        ["--compare", "none", "none", "--tree", "none"],
        ["--compare", "none", "none", "--format", "svg"],
        ["--compare", "none"],
        ["--compare", "none", "none", "--curves", "c.png"],
        ["--runner", "fast"],
        ["--tree", "none", "--format", "png"],
        ["--tree", "none", "--json", "--format", "dot"],
        ["--tree-size", "-1"],
        ["--format", "gif"],
    ],
)
def test_flags_that_contradict_each_other_are_a_usage_error(args: list[str]) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert result.stdout == ""


def test_neither_the_command_nor_the_drawings_import_torch_before_they_run() -> None:
    code = "import sys, medusa_cli.cli.inspect_tree; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
