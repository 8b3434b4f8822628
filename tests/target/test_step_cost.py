"""What a step costs is measured once for a model, a runner and a machine, and remembered."""

import pytest

from medusa_cli.home import cache_home
from medusa_cli.target import step_cost
from medusa_cli.target.step_cost import NODE_COUNTS, measure, step_costs
from tests.tiny_models import target_of, tiny_model


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


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"1": "fast"}', '{"1": -1}', '{"one": 1}', '{"2": 1.0}'])
def test_a_damaged_memory_is_measured_again(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    target = target_of(tiny_model("llama"))
    step_costs(target)
    for file in (cache_home() / "costs").iterdir():
        file.write_text(text)
    monkeypatch.setattr(step_cost, "measure", lambda target: {1: 7.0})
    assert step_costs(target) == {1: 7.0}
    assert step_costs(target) == {1: 7.0}
    assert '{"1": 7.0}' in {file.read_text().strip() for file in (cache_home() / "costs").iterdir()}
