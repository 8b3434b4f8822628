"""`medusa doctor`: what it says of a model, as text and as JSON, and how it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_cli.cli import doctor
from medusa_cli.cli.app import main
from medusa_cli.kernels import attend, blocks, native
from medusa_cli.model.runners import select
from medusa_cli.model.runners.stock import StockForward
from medusa_cli.model.target import Target
from medusa_cli.util import busy
from medusa_cli.util.paths import say_once
from tests.tiny_folders import CHAT_TEMPLATE, save_tiny


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "model", chat_template=CHAT_TEMPLATE)


def report(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    """The JSON document of a doctor that is content."""
    assert main(["doctor", "--json", "--device", "cpu", *map(str, args)]) == 0
    return json.loads(capsys.readouterr().out)


def lines(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, str]:
    """Label -> sentence of a doctor that is content."""
    assert main(["doctor", "--device", "cpu", *map(str, args)]) == 0
    printed = capsys.readouterr().out.splitlines()
    return {line[:14].rstrip(): line[15:] for line in printed}


def columns_for_positions(self: Target, tree: Any, place: Any) -> torch.Tensor:
    return place.columns_BN


def test_the_report_says_what_the_model_is_and_needs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = lines(capsys, folder, "--dtype", "float32", "--runner", "eager")
    assert f"torch {torch.__version__}" in said["versions"]
    assert said["model"] == f"{folder} (llama), 21.7 k parameters"
    assert said["device"].startswith("cpu (")
    assert said["device"].endswith(", 1 thread")
    assert said["dtype"] == "float32: as asked for"
    assert said["forward"] == "attention medusa_grouped, runner eager"
    assert said["layers"] == "2 full attention"
    assert said["cache"] == "tree cache, full length, 256 B a token"
    assert said["context"] == "64 tokens"
    assert said["vocabulary"] == "97 rows, 97 known to the tokenizer"
    assert said["stop ids"] == "2 w2"
    assert said["chat template"] == "yes"
    assert said["heads"].startswith("none known")
    assert said["self-check"].startswith("passed: tree and path logits differ by ")
    assert said["self-check"].endswith("of their spread, rounding explains 0.0002 (28 tokens)")


def test_the_document_holds_the_same_in_numbers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = report(capsys, folder, "--dtype", "float32", "--runner", "eager", "--attention", "eager")
    assert set(document["versions"]) == {"medusa", "python", "torch", "transformers"}
    assert document["parameters"] * 4 == document["weights_bytes"]
    assert document["cache_bytes_per_token"] == 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, width, bytes
    assert document["layers"] == [{"kind": "full_attention", "count": 2, "window": None}]
    assert document["stop_ids"] == {"2": "w2"}
    assert document["heads"] is None
    check = document["self_check"]
    assert check["ok"]
    assert 0 <= check["max_difference"] <= check["bound"]


def test_layers_are_listed_by_kind_with_their_window(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    save_tiny(tmp_path, "gemma3_text", sliding_window=8, num_hidden_layers=3, layer_types=kinds)
    assert lines(capsys, tmp_path)["layers"] == "2 sliding attention (window 8), 1 full attention"


def test_a_window_in_every_layer_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path, "mistral", sliding_window=8)
    assert lines(capsys, tmp_path)["layers"] == "2 sliding attention (window 8)"


def test_packed_weights_are_counted_once_as_parameters_and_as_held_in_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny(tmp_path, tie_word_embeddings=True)
    options = ["--dtype", "float32", "--runner"]
    eager, packed = (report(capsys, tmp_path, *options, runner) for runner in ("eager", "packed"))
    assert packed["parameters"] == eager["parameters"]
    # the embeddings stay beside the packed output matrix
    assert packed["weights_bytes"] == eager["weights_bytes"] + 97 * 32 * 4


def test_a_model_without_template_and_stop_ids_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path, eos_token_id=None)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": None}))
    said = lines(capsys, tmp_path)
    assert said["chat template"] == "no: prompts are taken as plain text"
    assert said["stop ids"] == "none: texts end at their budget only"


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("CXX", "no-such-launcher g++", "no C++ compiler: looked for no-such-launcher g++"),
        ("CXX", "false", "can't compile blocks.cpp"),
        ("MEDUSA_HOME", "a file", "Not a directory: '/"),
    ],
)
def test_what_keeps_the_quick_kernels_away_is_told(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    reason: str,
) -> None:
    if variable == "MEDUSA_HOME":
        (folder.parent / value).write_text("")
        value = str(folder.parent / value)
    monkeypatch.setenv(variable, value)
    forget_kernels()
    said = lines(capsys, folder, "--dtype", "float32")
    assert said["forward"] == "attention medusa_grouped, runner packed"
    assert said["kernels"].startswith("none, so steps are slower: ")
    assert reason in said["kernels"]
    assert reason in report(capsys, folder)["no_kernels"]
    assert "without compiled kernels" not in capsys.readouterr().err
    say_once.cache_clear()
    assert main(["doctor", "--device", "cpu", "-v", str(folder)]) == 0
    assert capsys.readouterr().err.count("steps are slower than they could be, without compiled kernels") == 1
    forget_kernels()


def test_kernels_that_are_there_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lines(capsys, folder)["kernels"] == "compiled here"
    assert report(capsys, folder)["no_kernels"] is None


def forget_kernels() -> None:
    """As in a new process."""
    for kept in (native.library, blocks.functions, attend.function, say_once):
        kept.cache_clear()


def test_model_and_argument_are_the_same_thing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(capsys, folder)["model"] == report(capsys, "--model", folder)["model"] == str(folder)


def test_two_different_models_are_a_usage_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(folder), "--model", "llama-2-7b"]) == 2
    assert "give one" in capsys.readouterr().err


def test_a_model_that_fails_its_check_is_refused_with_the_whole_report(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StockForward, "positions", columns_for_positions)
    assert main(["doctor", str(folder), "--dtype", "float32", "--device", "cpu"]) == 1
    out, err = capsys.readouterr()
    assert "self-check     FAILED: tree and path logits differ by " in out
    assert f"error: {folder} (llama) can't verify a tree" in err
    assert " hint: " in err


def test_the_document_of_a_failed_check_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StockForward, "positions", columns_for_positions)
    assert main(["doctor", str(folder), "--dtype", "float32", "--device", "cpu", "--json"]) == 1
    check = json.loads(capsys.readouterr().out)["self_check"]
    assert not check["ok"]
    assert "can't verify a tree" in check["error"]


def test_a_model_that_can_not_be_loaded_still_gets_the_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "lama-2-7b"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("versions       medusa ")
    assert err == (
        "error: unknown model 'lama-2-7b': no alias, no folder and no file of that name\n"
        " hint: did you mean llama-2-7b?\n"
    )


def test_heads_that_are_not_there_are_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(folder), "--heads", str(folder / "nowhere")]) == 1
    assert "no heads at" in capsys.readouterr().err


def test_heads_that_fit_are_named(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    heads = heads_for(folder, tmp_path / "heads")
    assert lines(capsys, folder, "--heads", heads)["heads"] == str(heads)


def test_heads_of_another_model_are_an_error(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    heads = heads_for(folder, tmp_path / "heads")
    other = save_tiny(tmp_path / "other", num_hidden_layers=3)
    assert main(["doctor", str(other), "--heads", str(heads)]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_the_document_goes_to_a_file(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(folder), "--output-json", str(tmp_path / "report.json")]) == 0
    assert json.loads((tmp_path / "report.json").read_text())["self_check"]["ok"]
    assert "self-check" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 "), (999, "999 "), (46_080, "46.1 k"), (134_515_008, "135 M"), (7e12, "7 T")]
)
def test_counts_are_short(count: float, text: str) -> None:
    assert doctor._metric(count) == text


def heads_for(model: Path, folder: Path) -> Path:
    """Fresh heads of one block for this model, written where a user would name them."""
    from medusa_cli.config.recipe import TargetSettings
    from medusa_cli.formats.native import write_heads
    from medusa_cli.heads.config import MedusaConfig
    from medusa_cli.heads.medusa import MedusaHeads
    from medusa_cli.model.loading.load import load_target

    target = load_target(TargetSettings(model=str(model), device="cpu", runner="eager"))
    config = MedusaConfig(
        num_heads=2,
        num_layers=1,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab=10,
        own_output=False,
        output_bias=False,
        target_name=target.name,
        target_fingerprint=target.fingerprint,
    )
    folder.mkdir()
    write_heads(MedusaHeads.fresh(config, torch.arange(10), target.output_weight, None), folder)
    return folder


@pytest.mark.parametrize("waiting", [0.0, 0.5])
def test_a_busy_machine_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, waiting: float
) -> None:
    monkeypatch.setattr(busy.Meter, "read", lambda self: busy.Contention(waiting, 0.0, 3.0, 2))
    said = lines(capsys, folder)["machine"]
    assert said.startswith("busy: our threads waited 50 % of" if waiting else "quiet: our threads waited 0 %")
    assert report(capsys, folder)["contention"]["busy"] == bool(waiting)


def test_how_threads_wait_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert lines(capsys, folder)["threads wait"] == "GOMP_SPINCOUNT=7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    assert "set GOMP_SPINCOUNT before torch is imported" in lines(capsys, folder)["threads wait"]


@pytest.mark.parametrize(("runner", "built"), [("auto", False), ("auto", True), ("packed", False)])
def test_a_compiled_runner_that_was_never_built_is_named_once_and_only_then(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, runner: str, built: bool
) -> None:
    monkeypatch.setattr(select.compiled, "folder_of", lambda model: folder)
    monkeypatch.setattr(select, "is_compiled", lambda model: False)
    monkeypatch.setattr(select.compiled, "is_built", lambda place: built)
    monkeypatch.setattr(Target, "attends_natively", True)
    said = lines(capsys, folder, "--dtype", "float32", "--runner", runner)
    assert ("quicker" in said) == (runner == "auto" and not built)
