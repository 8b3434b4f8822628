"""`medusa inspect-tree` on trained heads."""

import json
from pathlib import Path

import pytest

from medusa_cli.model.costs import kept
from medusa_cli.model.loading import load
from medusa_cli.util import busy
from tests.cli.harness import Medusa, make_model

STARTS = {"json": "{", "dot": "digraph", "svg": "<svg", "medusa-choices": "[", "text": "tree of "}


def test_the_document_counts_the_stored_tree_and_predicts_from_the_measured_cost(
    medusa: Medusa, heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    document = medusa("inspect-tree", "--heads", heads, "--json").document
    names = ["name", "tree", "prediction", "budget", "choice", "measured", "step_cost", "curve", "contexts"]
    assert list(document) == names
    assert document["tree"]["num_nodes"] == 6
    assert document["measured"]["source"].startswith("the target's own answers to held-out prompts")
    assert document["step_cost"]["source"] == "heads"
    assert set(document["step_cost"]["seconds"]) == {str(nodes) for nodes in range(1, 9)}
    assert document["prediction"]["speedup"] > 0


def test_costs_are_measured_here_on_demand_and_found_again_without_the_model(
    medusa: Medusa, tiny: Path, heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    args = ("inspect-tree", "--heads", heads, "--json")
    assert medusa(*args).document["step_cost"]["source"] == "heads"
    float32 = ("--dtype", "float32")
    measured = medusa(*args, *float32, "--measure", "-m", tiny, "--runner", "packed").document["step_cost"]
    assert (measured["source"], measured["runner"], measured["dtype"]) == ("here", "packed", "float32")
    medusa(*args, *float32, "--measure", "-m", tiny, "--runner", "eager")
    monkeypatch.setattr(load, "load_target", None)
    assert medusa(*args, *float32, "--runner", "packed").document["step_cost"] == measured
    assert medusa(*args, *float32, "--runner", "eager").document["step_cost"]["runner"] == "eager"
    assert medusa(*args, "--dtype", "bfloat16", "--runner", "eager").document["step_cost"]["source"] == "heads"


def test_one_run_in_another_dtype_changes_no_answer(
    medusa: Medusa, tiny: Path, heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    args = ("inspect-tree", "--heads", heads, "--json", "-m", tiny)
    write = ("generate", "Hi", "-m", tiny, "--heads", heads, "-n", 4, "--json")
    assert medusa(*write, "--dtype", "float32").code == 0
    mine = medusa(*args, "--dtype", "float32").document
    assert (mine["step_cost"]["source"], mine["step_cost"]["dtype"]) == ("here", "float32")
    assert medusa(*write, "--dtype", "bfloat16").code == 0
    assert medusa(*args, "--dtype", "float32").document == mine
    other = medusa(*args, "--dtype", "bfloat16").document["step_cost"]
    assert (other["source"], other["dtype"]) == ("here", "bfloat16")


@pytest.fixture
def no_costs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is known here of what steps cost: the stored tree is drawn."""
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))


def test_a_run_left_alone_leaves_what_its_steps_took(
    medusa: Medusa, tiny: Path, heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(kept, "BESIDE_S", 60.0)  # tests run beside others
    monkeypatch.setattr(kept, "OFF", 1e9)
    write = ("generate", "Hi", "-m", tiny, "--dtype", "float32", "--heads", heads, "-n", 40, "--ignore-eos", "--json")

    def laps(waiting: float) -> dict[str, float]:
        monkeypatch.setattr(busy.Meter, "read", lambda self: busy.Contention(waiting, 0.0, 1.0, 2))
        assert medusa(*write).code == 0
        (file,) = (tmp_path / "home" / "remembered" / "costs").glob("*.json")
        return json.loads(file.read_text())["value"]["laps"]

    assert laps(waiting=2.0) == {}, "what neighbours took says nothing of the next run"
    assert laps(waiting=0.0)


def test_heads_of_another_model_are_refused_before_its_costs_are_measured(
    medusa: Medusa, heads: Path, tmp_path: Path
) -> None:
    other = make_model(tmp_path / "other", seed=1)
    done = medusa("inspect-tree", "--heads", heads, "--measure", "-m", other, "--dtype", "float32")
    assert done.code == 1
    assert "fingerprint" in done.err


@pytest.mark.usefixtures("no_costs")
def test_the_curves_are_a_picture(medusa: Medusa, heads: Path, tmp_path: Path) -> None:
    done = medusa("inspect-tree", "--heads", heads, "--curves", tmp_path / "curves.png")
    assert (done.code, done.err) == (0, f"wrote {tmp_path / 'curves.png'}\n")
    assert done.out.startswith("tree of ")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("no_costs")
@pytest.mark.parametrize("format", STARTS)
def test_every_format_is_drawn(medusa: Medusa, heads: Path, format: str) -> None:
    done = medusa("inspect-tree", "--heads", heads, "--format", format)
    assert done.code == 0, done.err
    assert done.out.startswith(STARTS[format])


def test_a_png_goes_to_a_file_and_a_line_says_so(medusa: Medusa, heads: Path, tmp_path: Path) -> None:
    done = medusa("inspect-tree", "--heads", heads, "-o", tmp_path / "tree.png")
    assert (done.code, done.out, done.err) == (0, "", f"wrote {tmp_path / 'tree.png'}\n")
    assert (tmp_path / "tree.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("no_costs")
def test_the_document_goes_to_a_file_without_json_on_stdout(medusa: Medusa, heads: Path, tmp_path: Path) -> None:
    done = medusa("inspect-tree", "--heads", heads, "--output-json", tmp_path / "t.json")
    assert done.out.startswith("tree of ")
    assert json.loads((tmp_path / "t.json").read_text())["tree"]["num_nodes"] == 6


def test_a_tree_that_was_drawn_is_decoded_with(medusa: Medusa, tiny: Path, heads: Path, tmp_path: Path) -> None:
    file = tmp_path / "choices.txt"
    file.write_text(medusa("inspect-tree", "--heads", heads, "--tree-size", 3, "--format", "medusa-choices").out)
    args = ("generate", "Hi", "-m", tiny, "--dtype", "float32", "--heads", heads, "-n", 4, "--tree", file, "--json")
    assert medusa(*args).document["tree_size"] == 3


def test_costs_by_context_are_measured_for_one_node_and_the_tree_shown(
    medusa: Medusa, tiny: Path, heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    args = ("inspect-tree", "--heads", heads, "-m", tiny, "--dtype", "float32", "--measure", "--contexts", "200,16,16")
    done = medusa(*args, "--json", "--curves", tmp_path / "curves.png")
    assert done.code == 0, done.err
    contexts = done.document["contexts"]
    assert [cost["context"] for cost in contexts] == [16, 200]
    assert all(set(cost["seconds"]) == {"1", "7"} for cost in contexts), "six nodes and the root"
    assert contexts[1]["cache_bytes"] / contexts[0]["cache_bytes"] == 12.5
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    shown = medusa(*args, "--tree-size", 3).out
    assert "cost of a step by context:" in shown
    assert "4 nodes, ms" in shown


def test_without_heads_a_named_tree_s_costs_by_context_are_told_and_drawn(
    medusa: Medusa, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    args = ("inspect-tree", "-m", tiny, "--dtype", "float32", "--tree", "chain:3", "--measure", "--contexts", "8,64")
    done = medusa(*args, "--curves", tmp_path / "curves.svg")
    assert done.code == 0, done.err
    assert "64 tokens take" in done.out
    assert (tmp_path / "curves.svg").stat().st_size > 5_000


def test_a_context_beyond_the_model_is_refused_with_the_most_it_has(medusa: Medusa, tiny: Path, heads: Path) -> None:
    args = ("inspect-tree", "--heads", heads, "-m", tiny, "--dtype", "float32", "--measure")
    done = medusa(*args, "--contexts", "16,257")
    assert done.code == 1
    assert "a context of 257 tokens is beyond the 256 positions" in done.err
    assert " hint: name contexts up to 256" in done.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--contexts", "128"), "add --measure"),
        (("--contexts", "128", "--measure", "--compare", "none", "none"), "leave out --compare"),
        *(
            (("--contexts", bad, "--measure"), "numbers of tokens by commas")
            for bad in ("", "a", "0", "1,,2", "-5", "²")
        ),
    ],
)
def test_contexts_that_can_not_be_measured_are_a_usage_error(medusa: Medusa, flags: tuple[str, ...], said: str) -> None:
    done = medusa("inspect-tree", *flags)
    assert done.code == 2
    assert said in done.err
