"""`auto` takes what is quickest here, remembers it, and says so."""

import json
import logging
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from medusa_cli.contracts import Seen
from medusa_cli.errors import TargetError
from medusa_cli.kernels.blocks import BlockLinear, functions
from medusa_cli.kernels.native import CannotCompile
from medusa_cli.kernels.packed import PackedLinear
from medusa_cli.model.runners import autotune
from medusa_cli.model.runners import select as select_runner
from medusa_cli.model.runners.cuda_graphs import Recorded
from medusa_cli.model.runners.select import attach_forward, attach_graphs, choose_runner
from medusa_cli.util import remembered
from medusa_cli.util.busy import Contention
from medusa_cli.util.timing import Times
from tests.recorder import on_cpu
from tests.tiny_models import quantised_model, target_of, tiny_model

CPU = torch.device("cpu")


@pytest.fixture
def every_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Models of any size are measured, over few bytes, on a quiet machine; nothing is remembered from other tests."""
    monkeypatch.setattr(autotune.Meter, "read", lambda self: Contention(0.0, 0.0, 0.1, 2))
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(autotune, "LEAST_NUMBERS", 1)
    monkeypatch.setattr(autotune, "OUT_OF_CACHE", 2**14)


def slow(monkeypatch: pytest.MonkeyPatch, slow_one: type[nn.Module]) -> list[type[nn.Module]]:
    """A clock to which layers of one kind take ten times as long; returns what was timed."""
    timed = []

    def interleaved(work: dict[Any, Any], now: Any, *, rounds: int) -> dict[Any, Times]:
        for run in work.values():
            run()
            timed.append(type(run.layers[0]))
        return {name: Times((10.0 if type(run.layers[0]) is slow_one else 1.0,)) for name, run in work.items()}

    monkeypatch.setattr(autotune, "interleaved", interleaved)
    return timed


@pytest.mark.parametrize(
    ("slow_one", "runner"), [(nn.Linear, "blocks"), (PackedLinear, "blocks"), (BlockLinear, "packed")]
)
def test_auto_leaves_the_slow_layout(
    every_size: None, monkeypatch: pytest.MonkeyPatch, slow_one: type[nn.Module], runner: str
) -> None:
    try:
        functions()
    except CannotCompile as error:
        pytest.skip(str(error))
    timed = slow(monkeypatch, slow_one)
    assert target_of(quantised_model(), runner="auto").identity.runner == runner
    assert {*timed} == {nn.Linear, PackedLinear, BlockLinear}


def test_weights_on_no_grid_are_not_offered_blocks(every_size: None, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, nn.Linear)
    assert target_of(tiny_model("llama"), runner="auto").identity.runner == "packed"
    layers = [module for module in tiny_model("llama").modules() if type(module) is nn.Linear]
    assert list(autotune.layout_seconds(layers, blocks=True).seconds) == ["packed", "eager"]


def test_where_packing_is_slow_layers_stay_as_they_are(every_size: None, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, PackedLinear)
    target = target_of(tiny_model("llama"), runner="auto")
    assert target.identity.runner == "eager"
    assert not any(isinstance(module, PackedLinear) for module in target.model.modules())


def test_the_real_clock_finds_some_seconds_for_every_layout() -> None:
    layers = [module for module in tiny_model("llama").modules() if type(module) is nn.Linear]
    assert all(took > 0 for took in autotune.layout_seconds(layers, blocks=False).seconds.values())


def test_a_small_lead_is_noise_and_a_large_one_counts() -> None:
    def chosen(disturbed: bool, **seconds: float) -> str:
        return autotune.chosen(autotune.Compared(seconds, disturbed))

    assert chosen(False, blocks=1.05, packed=1.0) == "blocks"
    assert chosen(False, blocks=1.2, packed=1.0, eager=1.1) == "packed"
    assert chosen(True, blocks=1.9, packed=1.0) == "blocks", "beside others, more is noise"
    assert chosen(True, blocks=40.0, packed=1.0) == "packed"


def test_what_was_measured_once_is_remembered_and_said(
    every_size: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    timed = slow(monkeypatch, PackedLinear)
    with caplog.at_level(logging.DEBUG, logger="medusa_cli"):
        target_of(tiny_model("llama"), runner="auto")
        measured = len(timed)
        target_of(tiny_model("llama"), runner="auto")
    assert len(timed) == measured
    first, again = (record for record in caplog.records if "packed" in record.getMessage())
    assert first.getMessage() == again.getMessage()
    assert (first.levelno, again.levelno) == (logging.INFO, logging.DEBUG), "news once, then for whoever asks"


def value_in(text: str) -> str:
    """The value of a remembered fact, as it is written."""
    return json.dumps(json.loads(text)["value"])


def test_a_choice_made_in_a_busy_moment_does_not_rule_for_good(
    every_size: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow(monkeypatch, PackedLinear)
    monkeypatch.setattr(autotune.Meter, "read", lambda self: Contention(1.4, 0.0, 8.0, 2))
    assert target_of(tiny_model("llama"), runner="auto").identity.runner == "eager"
    assert "the machine was busy" in caplog.text
    monkeypatch.setattr(autotune.Meter, "read", lambda self: Contention(0.0, 0.0, 0.1, 2))
    timed = slow(monkeypatch, nn.Linear)
    assert target_of(tiny_model("llama"), runner="auto").identity.runner == "eager", "for some minutes it does"
    monkeypatch.setattr(remembered, "FRESH", timedelta(0))
    assert target_of(tiny_model("llama"), runner="auto").identity.runner == "packed"
    assert timed


@pytest.mark.parametrize(
    "spoilt",
    [
        "{", "[]", '{"seconds": {}}', '{"seconds": {"packed": "nan"}}', '{"seconds": 1}', "1",
        f'{{"seconds": {{"packed": 1{400 * "0"}}}}}',
    ],
)  # fmt: skip
def test_a_spoilt_memory_is_measured_anew(every_size: None, monkeypatch: pytest.MonkeyPatch, spoilt: str) -> None:
    timed = slow(monkeypatch, PackedLinear)
    target_of(tiny_model("llama"), runner="auto")
    (file,) = remembered.folder("runners").iterdir()
    whole = file.read_text()
    file.write_text(spoilt if spoilt in "{[]" else whole.replace(value_in(whole), spoilt))
    measured = len(timed)
    assert target_of(tiny_model("llama"), runner="auto").identity.runner == "eager"
    assert len(timed) > measured
    assert json.loads(file.read_text())["value"]["seconds"]


def test_a_home_that_can_not_be_written_to_costs_the_measurement_and_no_more(
    every_size: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow(monkeypatch, PackedLinear)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "file"))
    assert target_of(tiny_model("llama"), runner="auto").identity.runner == "eager"


def test_measuring_draws_no_random_numbers(every_size: None) -> None:
    before = torch.random.get_rng_state()
    layers = [module for module in tiny_model("llama").modules() if type(module) is nn.Linear]
    autotune.layout_seconds(layers, blocks=False)
    assert torch.equal(torch.random.get_rng_state(), before), "what is drawn later would depend on what is remembered"


# --- CUDA graphs, recorded by the tests' recorder ---


def by_clock(monkeypatch: pytest.MonkeyPatch, seconds: dict[bool, float]) -> None:
    """Steps with and without graphs take so long."""

    def interleaved(work: dict[Any, Any], now: Any, *, rounds: int) -> dict[Any, Times]:
        for run in work.values():
            run()
        return {name: Times((seconds[bool(run.forwards)] / 2,)) for name, run in work.items()}

    monkeypatch.setattr(select_runner, "on_cuda", lambda device: on_cpu)
    monkeypatch.setattr(autotune, "interleaved", interleaved)


@pytest.mark.parametrize(("with_graphs", "runner"), [(1.0, "graphs"), (2.05, "graphs"), (4.0, "eager")])
def test_auto_records_where_steps_get_no_slower(
    every_size: None, monkeypatch: pytest.MonkeyPatch, with_graphs: float, runner: str
) -> None:
    by_clock(monkeypatch, {True: with_graphs, False: 2.0})
    target = target_of(tiny_model("llama"), "sdpa")
    target.identity = replace(target.identity, runner="graphs")
    attach_forward(target, by_measurement=True)
    assert bool(target.forwards) == (runner == "graphs")
    assert target.identity.runner == runner


def refusing(run: Any) -> Recorded:
    """Records nothing."""
    seen: Seen = run()
    raise RuntimeError(f"operation not permitted when stream is capturing {seen.logits_BNV.shape[0]}")


def test_a_model_that_can_not_be_recorded_runs_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select_runner, "on_cuda", lambda device: refusing)
    target = target_of(tiny_model("llama"), "sdpa")
    attach_graphs(target, by_measurement=True)
    assert not target.forwards
    with pytest.raises(TargetError, match="graphs runner can't run tiny: operation not permitted") as caught:
        attach_graphs(target)
    assert "--runner auto" in caught.value.hint


def test_graphs_are_for_a_gpu() -> None:
    assert choose_runner("auto", torch.device("cuda"), torch.bfloat16) == "graphs"
    assert choose_runner("auto", torch.device("mps"), torch.float32) == "eager"
    with pytest.raises(TargetError, match="graphs runner needs a CUDA device, not cpu"):
        choose_runner("graphs", CPU, torch.float32)


def test_what_was_measured_in_one_dtype_or_attention_says_nothing_of_another(
    every_size: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for with_graphs, dtype, attention in (
        (4.0, "float32", "sdpa"),
        (1.0, "bfloat16", "sdpa"),
        (1.0, "float32", "eager"),
    ):
        by_clock(monkeypatch, {True: with_graphs, False: 2.0})
        found = autotune.Compared({"graphs": with_graphs, "without graphs": 2.0}, disturbed=False)
        monkeypatch.setattr(autotune, "forward_seconds", lambda target, name, forward, found=found: found)
        target = target_of(tiny_model("llama"), attention)
        monkeypatch.setattr(select_runner, "try_steps", lambda target: None)
        target.dtype = getattr(torch, dtype)
        attach_graphs(target, by_measurement=True)
        assert bool(target.forwards) == (with_graphs == 1.0), (dtype, attention)
