"""What `medusa inspect-tree` says of each size: costs of this machine or of the heads, gain, curves, the best size."""

import json
import re
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import torch

from medusa_cli.errors import DataError, TreeError
from medusa_cli.formats import places
from medusa_cli.model.costs.kept import CHOICES, Costs, keep, setting_of
from medusa_cli.util.optional import extra_hint
from medusa_cli.util.remembered import remember
from tests.trees.inspecting import make_heads, out_of, run, with_cost


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    return make_heads(tmp_path / "heads")


def test_without_a_measured_cost_it_says_so_and_predicts_nothing(heads: Path) -> None:
    out = out_of("--heads", heads)
    assert "No step cost was measured" in out
    assert "speed-up  " not in out
    document = json.loads(out_of("--heads", heads, "--json"))
    assert document["prediction"] is None
    assert document["choice"] is None
    assert [row["speedup"] for row in document["budget"]] == [None] * 6


def test_with_a_measured_cost_it_predicts_the_speed_up(heads: Path) -> None:
    with_cost(heads, {1: 0.04, 64: 0.08})
    out = out_of("--heads", heads)
    assert "nodes pay best" in out
    document = json.loads(out_of("--heads", heads, "--json"))
    assert [row["size"] for row in document["budget"]] == [0, 4, 8, 16, 32, 64]
    assert document["budget"][0] == {"size": 0, "expected_tokens": 1.0, "cost_ratio": 1.0, "speedup": 1.0}
    best = document["choice"]
    assert best["speedup"] == pytest.approx(best["expected_tokens"] / best["cost_ratio"])


def test_a_steep_cost_is_told_as_none(heads: Path) -> None:
    with_cost(heads, {1: 0.04, 64: 64 * 0.04})
    out = out_of("--heads", heads)
    assert "Best size: none. No tree pays at this step cost: plain decoding is faster." in out
    assert "best size: none" in out
    assert "best: none" in out


def test_the_document_has_the_whole_curve_and_whose_costs_it_is_reckoned_with(heads: Path) -> None:
    with_cost(heads, {1: 0.04, 64: 0.08})
    document = json.loads(out_of("--heads", heads, "--json"))
    assert [row["size"] for row in document["curve"]] == list(range(65))
    assert set(document["curve"][3]) == {"size", "expected_tokens", "cost_ratio", "speedup"}
    assert document["curve"][8] == document["budget"][2]
    assert document["step_cost"]["seconds"] == {"1": 0.04, "64": 0.08}
    assert (document["step_cost"]["source"], document["step_cost"]["runner"]) == ("heads", None)


@pytest.fixture
def remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Costs:
    """Costs that an earlier run measured here with the runner that `auto` took, and remembered."""
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    key = {**setting_of(torch.device("cpu")), "fingerprint": "abc", "dtype": "float32"}
    costs = Costs(
        seconds={1: 0.01, 8: 0.02},
        laps={},
        spread=0.0,
        disturbed=False,
        target="smollm2-135m",
        runner="compiled",
        attention="medusa_grouped",
        device="cpu",
        machine=key["machine"],
        threads=int(key["threads"]),
        measured="",
        fingerprint="abc",
        dtype="float32",
    )
    keep(costs, {**key, "runner": "compiled", "attention": "medusa_grouped"})
    keep(replace(costs, seconds={1: 9.0, 8: 9.0}), {**key, "dtype": "bfloat16", "runner": "eager", "attention": "sdpa"})
    keep(replace(costs, seconds={1: 8.0, 8: 8.0}), {**key, "runner": "eager", "attention": "sdpa"})
    remember(CHOICES, key, {"target": "smollm2-135m", "runner": "compiled"})
    return costs


def test_costs_remembered_on_this_machine_go_before_those_of_the_heads(heads: Path, remembered: Costs) -> None:
    with_cost(heads, {1: 0.04, 64: 0.08})
    out = " ".join(out_of("--heads", heads).split())
    assert "step cost: measured here with runner compiled on " in out
    assert "(float32, " in out
    document = json.loads(out_of("--heads", heads, "--json"))
    date = document["step_cost"].pop("date")
    assert datetime.fromisoformat(date).tzinfo is not None
    assert document["step_cost"] == {
        "source": "here", "seconds": {"1": 0.01, "8": 0.02}, "runner": "compiled", "dtype": "float32",
        "threads": remembered.threads, "disturbed": False,
    }  # fmt: skip
    assert document["budget"][1]["cost_ratio"] == pytest.approx(1 + 4 / 7)


def test_costs_of_the_settings_asked_for_are_the_answer_whatever_ran_last(heads: Path, remembered: Costs) -> None:
    def seconds(*flags: str) -> float:
        return json.loads(out_of("--heads", heads, "--json", *flags))["step_cost"]["seconds"]["1"]

    assert seconds() == seconds("--dtype", "float32") == seconds("--runner", "compiled") == 0.01
    assert seconds("--runner", "eager") == 8.0
    assert seconds("--dtype", "bfloat16", "--runner", "eager") == 9.0
    assert json.loads(out_of("--heads", heads, "--json", "--dtype", "bfloat16"))["step_cost"] is None


def test_the_tree_drawn_is_the_one_that_decoding_tends_to_here(heads: Path, remembered: Costs) -> None:
    document = json.loads(out_of("--heads", heads, "--json"))
    assert document["tree"]["num_nodes"] == min(16, document["choice"]["size"]) != 8
    assert document["name"].startswith("tree that pays best here")
    stored = json.loads(out_of("--heads", heads, "--json", "--tree", heads))
    assert stored["tree"]["num_nodes"] == 8
    assert json.loads(out_of("--heads", heads, "--json", "--tree-size", 3))["tree"]["num_nodes"] == 3


def test_costs_from_a_busy_moment_are_told_as_such(heads: Path, remembered: Costs) -> None:
    key = {**setting_of(torch.device("cpu")), "fingerprint": "abc", "dtype": "float32"}
    keep(replace(remembered, disturbed=True), {**key, "runner": "compiled", "attention": "medusa_grouped"})
    assert "The machine was busy meanwhile" in " ".join(out_of("--heads", heads).split())


def test_costs_of_another_runner_than_the_one_asked_for_are_left_out(heads: Path, remembered: Costs) -> None:
    with_cost(heads, {1: 0.04, 64: 0.08})
    out = " ".join(out_of("--heads", heads, "--runner", "blocks").split())
    assert "step cost: measured where the heads were trained" in out
    assert "--measure measures it here" in out


def test_costs_are_those_of_the_weights_the_heads_belong_to(heads: Path, remembered: Costs) -> None:
    config = {
        "num_heads": 3, "num_layers": 1, "hidden_size": 8, "vocab_size": 9, "draft_vocab": 9, "own_output": False,
        "output_bias": False, "target_name": "somewhere/else", "target_fingerprint": "abc",
    }  # fmt: skip
    description = {"format": "medusa-heads", "version": 1, "config": config}
    (heads / "heads.json").write_text(json.dumps(description))
    args = ("--heads", heads, "--model", "another/name", "--json")
    assert json.loads(out_of(*args))["step_cost"]["source"] == "here"
    description["config"] = {**config, "target_fingerprint": "def"}
    (heads / "heads.json").write_text(json.dumps(description))
    assert json.loads(out_of(*args))["step_cost"] is None


def test_costs_are_told_without_heads_too(remembered: Costs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "SHIPPED", tmp_path)
    out = " ".join(out_of("--tree", "2x2").split())
    assert "cost of a step in plain steps, by nodes with the root: 1: 1.00x, 8: 2.00x" in out
    assert "runner compiled" in out


def test_the_curves_are_drawn_in_characters_no_wider_than_the_terminal(heads: Path) -> None:
    pytest.importorskip("plotext")
    with_cost(heads, {1: 0.04, 64: 0.4})
    out = out_of("--heads", heads, columns=80)
    assert "tokens that a step brings (o), its cost in plain steps (x)" in out
    assert re.search(r"best size: \d+ nodes?, \d\.\d\dx", out)
    assert {"o", "x"} <= set(out[out.index("┌") : out.index("└┬")])
    assert "\x1b" not in out
    assert max(len(line) for line in out.splitlines()) <= 80


def test_without_plotext_the_table_is_shown_and_one_line_says_what_is_missing(
    heads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotext", None)
    with_cost(heads, {1: 0.04, 64: 0.4})
    out = out_of("--heads", heads)
    assert extra_hint("plot") in out
    assert "best tree of each size" in out
    assert "┌" not in out


@pytest.mark.parametrize(("name", "start"), [("c.png", b"\x89PNG"), ("c.svg", b"<?xml"), ("c.pdf", b"%PDF")])
@pytest.mark.parametrize("cost", [{1: 0.04, 64: 0.4}, {1: 1.0, 2: 9.0}, {1: 1.0}], ids=["pays", "none", "flat"])
def test_the_curves_are_drawn_as_a_picture(
    heads: Path, tmp_path: Path, name: str, start: bytes, cost: dict[int, float]
) -> None:
    pytest.importorskip("matplotlib")
    with_cost(heads, cost)
    result = run("--heads", heads, "--curves", tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)
    assert result.stderr == f"wrote {tmp_path / name}\n"
    assert "best tree of each size" in result.stdout


def test_curves_need_a_gain_and_a_cost_and_a_picture_s_name(
    heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(TreeError, match="no cost to draw"):
        run("--heads", heads, "--curves", tmp_path / "c.png")
    with pytest.raises(DataError, match="no picture file"):
        run("--heads", heads, "--curves", tmp_path / "c.txt")
    monkeypatch.setattr(places, "SHIPPED", tmp_path)
    with pytest.raises(TreeError, match="no gain to draw"):
        run("--tree", "2x2", "--curves", tmp_path / "c.png")
