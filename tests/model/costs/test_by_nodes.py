"""What a step costs is measured once for a model, a runner and a machine, remembered, doubted and corrected."""

import copy
import itertools
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_cli.model.costs import by_nodes
from medusa_cli.model.costs.by_nodes import NODE_COUNTS, Measured, curve_of, measure, measure_and_keep, step_costs
from medusa_cli.model.costs.kept import Asked, Costs, chosen_runner, correct, found, keep, kept, key_of, note_choice
from medusa_cli.model.target import Target
from medusa_cli.util import remembered
from medusa_cli.util.timing import Times
from tests.tiny_models import target_of, tiny_model

TINY = Asked("tiny", None, "float32", "cpu")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of this test's own."""
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def by_clock(monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], *, disturbed: bool = False) -> list[Target]:
    """Measuring finds this; returns what was measured."""
    measured: list[Target] = []

    def measure(target: Target) -> Measured:
        measured.append(target)
        return Measured(seconds, 0.0, disturbed)

    monkeypatch.setattr(by_nodes, "measure", measure)
    return measured


def files(home: Path) -> list[Path]:
    return list(home.glob("remembered/costs/*.json"))


def test_every_size_has_a_cost() -> None:
    costs = measure(target_of(tiny_model("llama"))).seconds
    assert tuple(costs) == NODE_COUNTS
    assert all(seconds > 0 for seconds in costs.values())
    assert list(costs.values()) == sorted(costs.values())


def test_measuring_draws_no_random_numbers() -> None:
    target = target_of(tiny_model("llama"))
    before = torch.random.get_rng_state()
    measure(target, (1, 2), rounds=1)
    assert torch.equal(torch.random.get_rng_state(), before), "what is drawn later would depend on what is remembered"


def test_it_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(tiny_model("llama"))
    measured = by_clock(monkeypatch, {1: 3.0})
    assert step_costs(target).seconds == step_costs(target).seconds == {1: 3.0}
    assert len(measured) == 1


def test_another_runner_has_costs_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    by_clock(monkeypatch, {1: 3.0})
    step_costs(target_of(tiny_model("llama")))
    by_clock(monkeypatch, {1: 5.0})
    assert step_costs(target_of(tiny_model("llama"), runner="packed")).seconds == {1: 5.0}


DAMAGED = ["", "{", "[]", "{}", '{"1": 0.5, "2": 0.75}', "[" * 100_000]
CHANGES: list[dict[str, Any]] = [
    *(
        {"value": {"target": "tiny", "laps": {}, "spread": 0.0, "seconds": seconds}}
        for seconds in ({"1": "fast"}, {"1": -1}, {"one": 1}, {"2": 1.0}, {"1": 1, "9" * 400: 1}, 3)
    ),
    *({"value": {"target": "tiny", "laps": {}, "spread": spread, "seconds": {"1": 1}}} for spread in (None, -1, "nan")),
    {"value": {"target": 3, "laps": {}, "spread": 0.0, "seconds": {"1": 1}}},
    {"value": {"target": "tiny", "laps": {"1": 0}, "spread": 0.0, "seconds": {"1": 1}}},
    {"at": "yesterday"},
    {"at": "2026-11-30T07:00:00"},
    {"at": 3},
    {"key": {"runner": "eager"}},
    {"key": {"runner": 3}},
    {"disturbed": "no"},
]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_memory_is_measured_again(home: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    target = target_of(tiny_model("llama"))
    by_clock(monkeypatch, {1: 7.0})
    step_costs(target)
    (file,) = files(home)
    file.write_text(text)
    assert found(TINY, "eager") == []
    measured = by_clock(monkeypatch, {1: 9.0})
    assert step_costs(target).seconds == step_costs(target).seconds == {1: 9.0}
    assert len(measured) == 1


@pytest.mark.parametrize("change", CHANGES)
def test_costs_that_lack_a_fact_or_a_time_are_measured_again(
    home: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    target = target_of(tiny_model("llama"))
    by_clock(monkeypatch, {1: 3.0})
    step_costs(target)
    (file,) = files(home)
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    assert found(TINY, "eager") == []
    by_clock(monkeypatch, {1: 7.0})
    assert step_costs(target).seconds == {1: 7.0}


def test_other_weights_of_the_same_shape_have_costs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    by_clock(monkeypatch, {1: 3.0})
    step_costs(target_of(model))
    torch.nn.init.ones_(model.get_input_embeddings().weight)
    by_clock(monkeypatch, {1: 5.0})
    assert step_costs(target_of(model)).seconds == {1: 5.0}


def test_what_was_measured_is_found_without_the_model_by_its_weights_or_its_name() -> None:
    target = target_of(tiny_model("llama"))
    costs = step_costs(target)
    (by_weights,) = found(replace(TINY, target="another name", fingerprint=target.fingerprint), "eager")
    (by_name,) = found(TINY, "eager")
    assert by_weights == by_name
    assert by_name.seconds == costs.seconds
    assert (by_name.runner, by_name.dtype, by_name.device) == ("eager", "float32", "cpu")
    assert datetime.now(UTC) - datetime.fromisoformat(by_name.measured) < timedelta(minutes=10)
    assert found(replace(TINY, fingerprint="other weights"), "eager") == []
    assert found(replace(TINY, target="another name"), "eager") == []


@pytest.mark.parametrize("asked", [replace(TINY, dtype="bfloat16"), replace(TINY, device="cuda")])
def test_costs_of_other_settings_are_no_answer(asked: Asked) -> None:
    step_costs(target_of(tiny_model("llama")))
    assert found(asked, "eager") == []
    assert found(TINY, "packed") == []


def test_the_newest_costs_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(tiny_model("llama"))
    by_clock(monkeypatch, {1: 5.0})
    costs = measure_and_keep(target)
    ages = iter((timedelta(0), timedelta(hours=1)))
    now = datetime.now(UTC)

    class Then(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return now - next(ages, timedelta(0))

    monkeypatch.setattr(remembered, "datetime", Then)
    for seconds in (1.0, 2.0):
        keep(replace(costs, seconds={1: seconds}), {**key_of(target), "config": str(seconds)})
    monkeypatch.setattr(remembered, "datetime", datetime)
    assert found(TINY, "eager")[-1].seconds == {1: 2.0}


@pytest.mark.parametrize(
    "change", [{"machine": "another processor"}, {"threads": "99"}, {"waits": "GOMP_SPINCOUNT=7"}, {"torch": "1.0"}]
)
def test_costs_of_another_machine_or_of_other_threads_are_not_found(change: dict[str, str]) -> None:
    target = target_of(tiny_model("llama"))
    costs = step_costs(target)
    remembered.forget("costs", key_of(target))
    keep(costs, {**key_of(target), **change})
    assert found(TINY, "eager") == []


def test_measuring_on_demand_replaces_what_was_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(tiny_model("llama"))
    step_costs(target)
    by_clock(monkeypatch, {1: 9.0})
    assert measure_and_keep(target).seconds == {1: 9.0}
    assert step_costs(target).seconds == {1: 9.0}


def test_a_home_that_takes_no_files_costs_a_measurement_and_no_error(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.write_text("a file, not a folder")
    by_clock(monkeypatch, {1: 9.0})
    assert step_costs(target_of(tiny_model("llama"))).seconds == {1: 9.0}
    assert found(TINY, "eager") == []


# --- busy moments ---


def test_a_size_that_a_busy_moment_hit_pulls_no_other_down() -> None:
    """What falls is pooled: the noise may lie in either, and a cheap large size says nothing of all others."""
    times = {1: 1.0, 2: 3.0, 4: 2.0, 8: 2.5}
    assert curve_of({n: Times((took,)) for n, took in times.items()}) == {1: 1.0, 2: 2.5, 4: 2.5, 8: 2.5}
    dear = curve_of({n: Times((took,)) for n, took in {1: 23.0, 2: 24.0, 8: 50.0, 64: 30.0}.items()})
    assert dear == {1: 23.0, 2: 24.0, 8: 40.0, 64: 40.0}


def test_costs_are_the_least_of_their_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up, rounds = [0, 5, 0, 5], ([0, 1, 0, 9, 0], [0, 3, 0, 8, 0], [0, 2, 0, 8, 0])
    ticks, moments = iter([0, *warm_up, *itertools.chain(*rounds)]), [0.0]

    def now(device: torch.device) -> float:
        moments.append(moments[-1] + next(ticks) / 1000)
        return moments[-1]

    monkeypatch.setattr(by_nodes, "now", now)
    found = measure(target_of(tiny_model("llama")), (1, 2), context=4, rounds=3)
    assert found.seconds == pytest.approx({1: 0.001, 2: 0.008})
    assert found.disturbed, "rounds that take 1, 3 and 2 were not left alone"


def test_what_a_busy_moment_found_is_believed_for_minutes_only(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(tiny_model("llama"))
    by_clock(monkeypatch, {1: 900.0}, disturbed=True)
    assert step_costs(target).disturbed
    measured = by_clock(monkeypatch, {1: 9.0})
    assert step_costs(target).seconds == {1: 900.0}
    (file,) = files(home)
    before = datetime.now(UTC) - remembered.FRESH - timedelta(minutes=1)
    file.write_text(json.dumps({**json.loads(file.read_text()), "at": before.isoformat()}))
    assert step_costs(target).seconds == {1: 9.0}
    assert len(measured) == 1


def test_old_costs_are_measured_anew(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(tiny_model("llama"))
    by_clock(monkeypatch, {1: 3.0})
    step_costs(target)
    (file,) = files(home)
    file.write_text(json.dumps({**json.loads(file.read_text()), "at": "2020-01-01T00:00:00+00:00"}))
    by_clock(monkeypatch, {1: 4.0})
    assert step_costs(target).seconds == {1: 4.0}


# --- corrected by what decoding sees ---


def stored(target: Target, monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float]) -> Costs:
    by_clock(monkeypatch, seconds)
    return step_costs(target)


def test_what_steps_took_is_kept_beside_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(tiny_model("llama"))
    stored(target, monkeypatch, {1: 1.0, 2: 1.5})
    correct(key_of(target), {1: 1.2, 3: 4.0})
    correct(key_of(target), {1: 1.4})
    known = kept(key_of(target))
    assert known is not None
    assert known.seconds == {1: 1.0, 2: 1.5}
    assert known.laps == {1: pytest.approx(1.3), 3: 4.0}


@pytest.mark.parametrize("plain", [0.4, 2.1, 30.0])
def test_plain_steps_twice_off_are_a_reason_to_measure_again(monkeypatch: pytest.MonkeyPatch, plain: float) -> None:
    target = target_of(tiny_model("llama"))
    stored(target, monkeypatch, {1: 1.0, 2: 1.5})
    correct(key_of(target), {1: plain})
    assert kept(key_of(target)) is None
    assert stored(target, monkeypatch, {1: plain}).seconds == {1: plain}


def test_what_a_small_model_s_step_takes_beside_its_forward_is_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(tiny_model("llama"))
    stored(target, monkeypatch, {1: 0.001, 2: 0.001})
    correct(key_of(target), {1: 0.006})
    assert kept(key_of(target)) is not None


def test_nothing_is_made_where_nothing_was_measured(home: Path) -> None:
    correct(key_of(target_of(tiny_model("llama"))), {1: 1.0})
    assert files(home) == []


# --- which runner auto took ---


def test_what_auto_took_last_is_told_without_the_model() -> None:
    target = target_of(tiny_model("llama"), runner="packed")
    assert chosen_runner(TINY) is None
    note_choice(target)
    assert chosen_runner(TINY) == "packed"
    assert chosen_runner(replace(TINY, dtype="bfloat16")) is None
    target.identity = replace(target.identity, runner="compiled")
    note_choice(target)
    assert chosen_runner(TINY) == "compiled"
