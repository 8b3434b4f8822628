"""`medusa inspect-tree` on trained heads."""

import json
from pathlib import Path

import pytest

from tests.cli.harness import Medusa

STARTS = {"json": "{", "dot": "digraph", "svg": "<svg", "medusa-choices": "[", "text": "tree of "}


def test_the_document_counts_the_stored_tree_and_predicts_from_the_measured_cost(medusa: Medusa, heads: Path) -> None:
    document = medusa("inspect-tree", "--heads", heads, "--json").document
    assert list(document) == ["name", "tree", "prediction", "budget", "choice", "measured", "step_cost"]
    assert document["tree"]["num_nodes"] == 6
    assert document["measured"]["source"].startswith("the target's own answers to held-out prompts")
    assert set(document["step_cost"]) == {str(nodes) for nodes in range(1, 9)}
    assert document["prediction"]["speedup"] > 0


@pytest.mark.parametrize("format", STARTS)
def test_every_format_is_drawn(medusa: Medusa, heads: Path, format: str) -> None:
    done = medusa("inspect-tree", "--heads", heads, "--format", format)
    assert done.code == 0, done.err
    assert done.out.startswith(STARTS[format])


def test_a_png_goes_to_a_file_and_a_line_says_so(medusa: Medusa, heads: Path, tmp_path: Path) -> None:
    done = medusa("inspect-tree", "--heads", heads, "-o", tmp_path / "tree.png")
    assert (done.code, done.out, done.err) == (0, "", f"wrote {tmp_path / 'tree.png'}\n")
    assert (tmp_path / "tree.png").read_bytes().startswith(b"\x89PNG")


def test_the_document_goes_to_a_file_without_json_on_stdout(medusa: Medusa, heads: Path, tmp_path: Path) -> None:
    done = medusa("inspect-tree", "--heads", heads, "--output-json", tmp_path / "t.json")
    assert done.out.startswith("tree of ")
    assert json.loads((tmp_path / "t.json").read_text())["tree"]["num_nodes"] == 6


def test_a_tree_that_was_drawn_is_decoded_with(medusa: Medusa, tiny: Path, heads: Path, tmp_path: Path) -> None:
    file = tmp_path / "choices.txt"
    file.write_text(medusa("inspect-tree", "--heads", heads, "--tree-size", 3, "--format", "medusa-choices").out)
    args = ("generate", "Hi", "-m", tiny, "--dtype", "float32", "--heads", heads, "-n", 4, "--tree", file, "--json")
    assert medusa(*args).document["tree_size"] == 3
