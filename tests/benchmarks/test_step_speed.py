"""A shape of random weights is measured by nodes and context; without a GPU the way is the same, and it says so."""

import json
import re
from pathlib import Path

import pytest
import torch

from medusa_cli.errors import FormatError
from tests.benchmarks import step_speed
from tests.benchmarks.step_speed import Step, copy_bandwidth, random_target, verdict
from tests.tools import docs_page

TINY = ["--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--nodes", "4", "--contexts", "8,32"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A measurement of the tiny shape."""
    made = tmp_path_factory.mktemp("runs") / "new" / "shape.json"
    step_speed.main([*TINY, "--output-json", str(made)])
    return made


def test_every_context_and_number_of_nodes_has_a_step_and_its_ratios(file: Path) -> None:
    document = step_speed.read_document(file)
    assert [(step.context, step.nodes) for step in document.steps] == [(8, 1), (8, 4), (32, 1), (32, 4)]
    plain = {step.context: step.seconds for step in document.steps if step.nodes == 1}
    for step in document.steps:
        read = document.weight_bytes + document.cache_bytes[step.context]
        assert step.to_one_node == pytest.approx(step.seconds / plain[step.context])
        assert step.to_reading_once == pytest.approx(step.seconds / (read / document.bandwidth))
    assert document.cache_bytes[32] == 4 * document.cache_bytes[8] > 0
    assert document.device == "cpu"
    assert re.match(r"\d{4}-\d\d-\d\dT", document.date)


def test_the_numbers_of_the_model_are_counted_whatever_its_layers_became(file: Path) -> None:
    hidden, inner, layers, heads, key_heads, vocabulary = step_speed.SHAPES["tiny"]
    attention = 2 * hidden * hidden + 2 * hidden * hidden * key_heads // heads
    layer = attention + 3 * hidden * inner + 2 * hidden
    assert step_speed.read_document(file).parameters == layers * layer + 2 * vocabulary * hidden + hidden


def test_the_shape_for_a_gpu_has_seven_billion_numbers() -> None:
    hidden, inner, layers, heads, key_heads, vocabulary = step_speed.SHAPES["llama-7b"]
    attention = 2 * hidden * hidden + 2 * hidden * hidden * key_heads // heads
    total = layers * (attention + 3 * hidden * inner + 2 * hidden) + 2 * vocabulary * hidden + hidden
    assert total == 6_738_415_616


def test_a_copy_reads_and_writes_at_a_bandwidth_a_machine_can_have() -> None:
    assert 1e7 < copy_bandwidth(torch.device("cpu")) < 1e12


def test_random_weights_are_made_in_the_dtype_asked_for() -> None:
    assert random_target("tiny", torch.device("cpu"), "bfloat16").dtype == torch.bfloat16


def _steps(*ratios: float) -> list[Step]:
    return [
        Step(context=8, nodes=nodes, seconds=1.0, to_one_node=ratio, to_reading_once=2.0)
        for ratio in ratios
        for nodes in (1, 64)
    ]


@pytest.mark.parametrize(
    ("ratios", "word"),
    [
        ((1.1, 1.4), "are cheap here"),
        ((1.6, 3.0), "are dear here"),
        ((1.1, 3.0), "at some contexts"),
    ],
)
def test_the_verdict_says_whether_many_nodes_cost_little_more_than_one(ratios: tuple[float, ...], word: str) -> None:
    said = verdict(_steps(*ratios))
    assert word in said
    assert f"{min(ratios):.2f} to {max(ratios):.2f} plain steps" in said
    assert "2.00 to 2.00 times as long as reading weights and cache once" in said


def test_the_table_and_the_verdict_are_printed_or_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    step_speed.main(TINY)
    shown = capsys.readouterr().out
    assert "| context | nodes | ms a step | to 1 node | to reading once |" in shown
    assert "guesses are " in shown
    step_speed.main([*TINY, "--json"])
    assert json.loads(capsys.readouterr().out)["shape"] == "tiny"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so_and_a_hint_how_to_try() -> None:
    with pytest.raises(SystemExit) as caught:
        step_speed.main([])
    error, hint = str(caught.value.code).splitlines()
    assert error == "error: this measurement is for a GPU, and torch sees none on this machine"
    assert "--shape tiny --device cpu" in hint


def test_a_context_beyond_the_positions_is_an_error_with_a_hint() -> None:
    with pytest.raises(SystemExit, match="beyond the 16384 positions.*\n hint: "):
        step_speed.main(["--shape", "tiny", "--device", "cpu", "--contexts", "20000"])


@pytest.mark.parametrize("flags", [["--nodes", "0"], ["--contexts", "a"], ["--shape", "huge"]])
def test_numbers_that_are_none_are_a_usage_error(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        step_speed.main(flags)
    assert caught.value.code == 2


def test_a_file_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="error: can't write "):
        step_speed.main([*TINY, "--output-json", str(tmp_path)])


def test_a_measurement_becomes_a_part_of_the_page(file: Path, tmp_path: Path) -> None:
    doc = tmp_path / "page.md"
    doc.write_text("before\n<!-- bench:begin gpu -->\n<!-- bench:end gpu -->\nafter\n")
    assert docs_page.write_page([file], doc, None) == ["gpu"]
    once = doc.read_text()
    assert "| 32 | 4 |" in once
    assert step_speed.read_document(file).verdict in once
    assert docs_page.write_page([file], doc, None) == ["gpu"]
    assert doc.read_text() == once


@pytest.mark.parametrize("content", ['{"shape": "tiny"}', '{"shape": 3}'])
def test_a_bad_measurement_is_named(tmp_path: Path, content: str) -> None:
    bad, doc = tmp_path / "bad.json", tmp_path / "page.md"
    bad.write_text(content)
    doc.write_text("")
    with pytest.raises(FormatError, match="bad.json is no measurement of a shape"):
        docs_page.write_page([bad], doc, None)
