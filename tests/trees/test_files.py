"""Trees as words and files, and what is said of those that are none."""

import json
import os
from pathlib import Path

import pytest

from medusa_cli.errors import FormatError, TreeError
from medusa_cli.trees.dynamic import DynamicShape
from medusa_cli.trees.files import parse_tree, read_measured, read_shape, read_tree, write_tree
from medusa_cli.trees.tree import TokenTree


@pytest.mark.parametrize(
    ("spec", "paths"),
    [
        ("none", []),
        ("empty", []),
        ("chain:0", []),
        ("chain:3", [(0,), (0, 0), (0, 0, 0)]),
        ("3", [(0,), (1,), (2,)]),
        ("2x1", [(0,), (1,), (0, 0), (1, 0)]),
        (
            "2x2x1",
            [(0,), (1,), *[(a, b) for a in (0, 1) for b in (0, 1)], *[(a, b, 0) for a in (0, 1) for b in (0, 1)]],
        ),
        (" [[0],[0,0],[1]] ", [(0,), (1,), (0, 0)]),
        ("[[1], [0, 0], [0]]", [(0,), (1,), (0, 0)]),
        ("[(0,), (0, 1),]", [(0,), (0, 1)]),
        ("[]", []),
    ],
)
def test_a_spec_means_a_tree(spec: str, paths: list[tuple[int, ...]]) -> None:
    assert parse_tree(spec).paths() == paths


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("", "no tree is named"),
        ("[[0],[0]]", r"path \[0\] is in the tree twice"),
        ("[[0,0]]", r"path \[0, 0\] lacks its prefix \[0\]"),
        ("[[0],[]]", r"an empty path \[\]"),
        ("[[-1]]", "holds -1, which is no rank"),
        ("[[0.0]]", "holds 0.0, which is no rank"),
        ("[[true]]", "holds True, which is no rank"),
        ('[["0"]]', "holds '0', which is no rank"),
        ("[[[0]]]", r"holds \[0\], which is no rank"),
        ("[[99999999999]]", "which is no rank"),
        ("[0, 1]", "0 is no path"),
        ("[[0], null]", "None is no path"),
        ("[[0], {}]", "{} is no path"),
        ("[[0]", "neither JSON nor a Python list"),
        ("[__import__('os').getcwd()]", "neither JSON nor a Python list"),
        ("[" * 100_000, "neither JSON nor a Python list"),
        ("0x2", "a depth without nodes"),
        ("4x", "neither a tree nor a file"),
        ("chain:-1", "neither a tree nor a file"),
        ("chain:1025", "more than 1024 nodes"),
        ("chain:" + "9" * 5000, "more than 1024 nodes"),
        ("32x32x32", "more than 1024 nodes"),
        ("x".join(["9" * 50] * 50), "more than 1024 nodes"),
        (str([[rank] for rank in range(1025)]), "more than 1024 nodes"),
        ("no/such/file", "neither a tree nor a file"),
        ("n" * 5000, "can't read the tree file"),
        ("\0", "can't read the tree file"),
    ],
)
def test_what_is_no_tree_is_refused_with_the_reason(spec: str, reason: str) -> None:
    with pytest.raises(TreeError, match=reason) as error:
        parse_tree(spec)
    assert len(error.value.message) < 300
    assert error.value.hint


def test_a_tree_deeper_than_the_heads_names_the_head_it_lacks() -> None:
    with pytest.raises(TreeError, match=r"path \[0, 0, 0, 0\] needs head 4; 3 present"):
        parse_tree("chain:5").check_fits(num_heads=3, num_ranks=10)
    with pytest.raises(TreeError, match=r"path \[10\] asks for rank 10; a head offers ranks 0 to 9"):
        parse_tree("11").check_fits(num_heads=3, num_ranks=10)


@pytest.mark.parametrize(
    "text",
    [
        '{"paths": [[0], [1], [0, 0]], "expected_tokens": 1.4}',
        "[[0], [1], [0, 0]]",
        "[(0,), (1,), (0, 0)]  # a comment",
        "\ufeff[[0], [1], [0, 0]]",
        "# choices\nimport os\nmc_sim_7b_63 = [[0], [1], [0, 0]]\n",
    ],
)
def test_a_tree_file_is_read_in_all_its_forms(tmp_path: Path, text: str) -> None:
    file = tmp_path / "choices"
    file.write_text(text, encoding="utf-8")
    assert parse_tree(str(file)).paths() == [(0,), (1,), (0, 0)]


def test_a_folder_means_its_tree_json(tmp_path: Path) -> None:
    write_tree(tmp_path / "tree.json", TokenTree.chain(2), {})
    assert parse_tree(str(tmp_path)).paths() == [(0,), (0, 0)]


def test_one_of_many_choices_in_a_python_file_is_picked_by_name(tmp_path: Path) -> None:
    file = tmp_path / "medusa_choices.py"
    file.write_text("small = [[0]]\nlarge = [[0], [1]]\n")
    with pytest.raises(TreeError, match="holds 2 trees: small, large") as error:
        read_tree(file)
    assert error.value.hint == f"pick one: {file}:small"
    assert parse_tree(f"{file}:large").paths() == [(0,), (1,)]


def test_a_python_file_is_never_run(tmp_path: Path) -> None:
    file = tmp_path / "choices.py"
    file.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nchoices = [[n] for n in range(4)]\n")
    with pytest.raises(TreeError, match="no list of paths"):
        read_tree(file)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"hello there", "no list of paths"),
        (b"{}", 'holds no "paths"'),
        (b'{"paths": 3}', "3 is no list of paths"),
        (b'{"paths": {"0": []}}', "is no list of paths"),
        (b'{"paths": [[0], [0]]}', "twice"),
        (b"\xff\xfe\x00", "can't read the tree file"),
        (b"[[0],\n" * 1_000_000, "too big for a tree"),
    ],
)
def test_a_bad_tree_file_is_named_with_the_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "tree.json"
    file.write_bytes(content)
    with pytest.raises(TreeError, match=reason) as error:
        read_tree(file)
    assert "tree.json" in error.value.message


def test_a_failed_write_leaves_the_old_tree_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tree.json"
    write_tree(file, TokenTree.chain(2), {})

    def fail(source: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_tree(file, TokenTree.chain(4), {})
    assert read_tree(file).paths() == [(0,), (0, 0)]
    assert [each.name for each in tmp_path.iterdir()] == ["tree.json"]


def test_measured_accuracies_are_read_with_the_step_cost_of_either_file(tmp_path: Path) -> None:
    facts = {"plain": [[0.3, 0.1]], "conditional": [[0.4, 0.2]], "positions": 7, "source": "dev"}
    (tmp_path / "accuracy.json").write_text(json.dumps(facts))
    assert read_measured(tmp_path).step_cost is None
    (tmp_path / "provenance.json").write_text(json.dumps({"step_cost": {"1": 0.1, "16": 0.2}}))
    measured = read_measured(tmp_path)
    assert (measured.plain_KR, measured.conditional_KR) == ([[0.3, 0.1]], [[0.4, 0.2]])
    assert (measured.positions, measured.source) == (7, "dev")
    assert measured.step_cost == {1: 0.1, 16: 0.2}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nonsense", "can't read"),
        ("[]", "no JSON object"),
        ("{}", '"plain" is no table'),
        ('{"plain": [[1.5]]}', '"plain" is no table'),
        ('{"plain": [[NaN]]}', '"plain" is no table'),
        ('{"plain": [[]]}', '"plain" is no table'),
        ('{"plain": [[0.5, 0.1], [0.5]]}', "differ in length"),
        ('{"plain": [[0.5]], "step_cost": {"x": 1}}', '"step_cost" is no table'),
        ('{"plain": [[0.5]], "step_cost": [1]}', '"step_cost" is no table'),
        ('{"plain": [[0.5]], "step_cost": {"1": 1%s}}' % ("0" * 400), '"step_cost" is no table'),
        ('{"plain": [[1%s]]}' % ("0" * 400), '"plain" is no table'),
    ],
)
def test_bad_accuracies_are_refused_with_the_file_named(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "accuracy.json").write_text(text)
    with pytest.raises(FormatError, match=reason) as error:
        read_measured(tmp_path)
    assert "accuracy.json" in error.value.message


def test_missing_accuracies_are_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"accuracy\.json is missing"):
        read_measured(tmp_path)


def test_a_dynamic_shape_stored_with_the_tree_is_what_heads_draft_in(tmp_path: Path) -> None:
    write_tree(tmp_path / "tree.json", TokenTree.chain(2), {})
    assert read_shape(tmp_path).paths() == [(0,), (0, 0)]
    write_tree(tmp_path / "tree.json", TokenTree.chain(2), {"dynamic": DynamicShape(6, 0.05).spec})
    assert read_shape(tmp_path) == DynamicShape(6, 0.05)
    assert read_tree(tmp_path).paths() == [(0,), (0, 0)]
    (tmp_path / "tree.json").write_text("[[0]]")
    assert read_shape(tmp_path).paths() == [(0,)]


@pytest.mark.parametrize("spec", [6, "chain:3", "dynamic:0", ""])
def test_a_dynamic_shape_that_is_none_is_refused(tmp_path: Path, spec: object) -> None:
    (tmp_path / "tree.json").write_text(json.dumps({"paths": [[0]], "dynamic": spec}))
    with pytest.raises(TreeError, match="dynamic tree|size goes from"):
        read_shape(tmp_path)
