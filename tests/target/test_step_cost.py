"""What a step costs is measured once for a model, a runner and a machine, and remembered."""

import copy
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_cli.target import step_cost
from medusa_cli.target.costs import Asked, found, keep
from medusa_cli.target.step_cost import NODE_COUNTS, measure, measure_and_keep, step_costs, undisturbed
from tests.tiny_models import target_of, tiny_model


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of this test's own."""
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_every_size_has_a_cost() -> None:
    costs = measure(target_of(tiny_model("llama")))
    assert tuple(costs) == NODE_COUNTS
    assert all(seconds > 0 for seconds in costs.values())


def test_it_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(tiny_model("llama"))
    found = step_costs(target)
    monkeypatch.setattr(step_cost, "measure", None)
    assert step_costs(target) == found


def test_another_runner_has_costs_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    step_costs(target_of(tiny_model("llama")))
    monkeypatch.setattr(step_cost, "measure", lambda target: {1: 5.0})
    assert step_costs(target_of(tiny_model("llama"), runner="packed")) == {1: 5.0}


DAMAGED = ["", "{", "[]", "{}", '{"1": 0.5, "2": 0.75}', "[" * 100_000]
CHANGES: list[dict[str, Any]] = [
    *(
        {"seconds": seconds}
        for seconds in ({"1": "fast"}, {"1": -1}, {"one": 1}, {"2": 1.0}, {"1": 1, "9" * 400: 1}, 3)
    ),
    {"measured": "yesterday"},
    {"measured": "2026-11-30T07:00:00"},
    {"measured": 3},
    {"threads": "two"},
    {"runner": None},
]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_memory_is_measured_again(home: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    target = target_of(tiny_model("llama"))
    step_costs(target)
    for file in home.glob("costs/*.json"):
        file.write_text(text)
    monkeypatch.setattr(step_cost, "measure", lambda target: {1: 7.0})
    assert step_costs(target) == {1: 7.0}
    assert step_costs(target) == {1: 7.0}
    assert {"1": 7.0} in [json.loads(file.read_text())["seconds"] for file in home.glob("costs/*.json")]


@pytest.mark.parametrize("change", CHANGES)
def test_costs_that_lack_a_fact_or_a_time_are_measured_again(
    home: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    target = target_of(tiny_model("llama"))
    step_costs(target)
    for file in home.glob("costs/*.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    monkeypatch.setattr(step_cost, "measure", lambda target: {1: 7.0})
    assert step_costs(target) == {1: 7.0}


def test_other_weights_of_the_same_shape_have_costs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    step_costs(target_of(model))
    torch.nn.init.ones_(model.get_input_embeddings().weight)
    monkeypatch.setattr(step_cost, "measure", lambda target: {1: 5.0})
    assert step_costs(target_of(model)) == {1: 5.0}


def test_what_was_measured_is_found_without_the_model_by_its_weights_or_its_name(home: Path) -> None:
    target = target_of(tiny_model("llama"))
    seconds = step_costs(target)
    (by_weights,) = found(Asked("another name", target.fingerprint))
    (by_name,) = found(Asked(target.name))
    assert by_weights == by_name
    assert by_name.seconds == seconds
    assert (by_name.runner, by_name.dtype, by_name.device) == ("eager", "float32", "cpu")
    assert datetime.now(UTC) - datetime.fromisoformat(by_name.measured) < timedelta(minutes=10)
    assert found(Asked(target.name, "other weights")) == []
    assert found(Asked("another name")) == []


def test_the_newest_costs_come_first_and_a_runner_that_was_named_is_kept_to(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_cost, "measure", lambda target: {1: 5.0})
    for runner in ("eager", "packed"):
        costs = measure_and_keep(target_of(tiny_model("llama"), runner=runner))
        keep(replace(costs, measured=f"2026-11-0{len(runner) - 4}T00:00:00+00:00"), runner)
    for file in home.glob("costs/*.json"):
        if file.stem not in ("eager", "packed"):
            file.unlink()
    assert [costs.runner for costs in found(Asked("tiny"))] == ["packed", "eager"]
    assert [costs.runner for costs in found(Asked("tiny", runner="eager"))] == ["eager"]
    assert found(Asked("tiny", dtype="bfloat16")) == []
    assert found(Asked("tiny", device="cuda")) == []


@pytest.mark.parametrize("change", [{"machine": "another processor"}, {"threads": 99}])
def test_costs_of_another_machine_or_of_other_threads_are_not_found(home: Path, change: dict[str, Any]) -> None:
    step_costs(target_of(tiny_model("llama")))
    (costs,) = found(Asked("tiny"))
    for file in home.glob("costs/*.json"):
        file.unlink()
    keep(replace(costs, **change), "elsewhere")
    assert found(Asked("tiny")) == []


def test_measuring_on_demand_replaces_what_was_remembered(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(tiny_model("llama"))
    step_costs(target)
    monkeypatch.setattr(step_cost, "measure", lambda target: {1: 9.0})
    assert measure_and_keep(target).seconds == {1: 9.0}
    assert step_costs(target) == {1: 9.0}


def test_a_home_that_takes_no_files_costs_a_measurement_and_no_error(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.write_text("a file, not a folder")
    monkeypatch.setattr(step_cost, "measure", lambda target: {1: 9.0})
    assert step_costs(target_of(tiny_model("llama"))) == {1: 9.0}
    assert found(Asked("tiny")) == []


def test_a_size_that_a_busy_moment_hit_costs_no_more_than_a_larger_one() -> None:
    assert undisturbed({1: 1.0, 2: 3.0, 4: 2.0, 8: 2.5}) == {1: 1.0, 2: 2.0, 4: 2.0, 8: 2.5}
