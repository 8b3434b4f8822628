"""What a user hardly means to give: streams that are closed, names that are none, files that lie about their content."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.harness import ROOT, Done, Medusa, run_here
from tests.cli.test_bad_input import told

DEEP = "[" * 100_000


@pytest.fixture
def ask(medusa: Medusa, tiny: Path) -> Callable[..., Done]:
    """A generate of the tiny model."""
    return lambda *args, **more: medusa("generate", "-m", tiny, "--dtype", "float32", "-n", 4, "-q", *args, **more)


def copied(folder: Path, to: Path) -> Path:
    """A copy of a folder of heads or of a model, to be spoilt."""
    return Path(shutil.copytree(folder, to, ignore=shutil.ignore_patterns("written", "checkpoints")))


def changed(file: Path, **values: Any) -> None:
    """Put values into a JSON object on disk."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


# --- names ---


@pytest.mark.parametrize("name", ["", " ", "x" * 5000, "owner/" + "x" * 5000, "~nobody-here/model"])
@pytest.mark.parametrize("flag", ["--model", "--heads"])
def test_a_name_that_is_none_is_told_as_such(flag: str, name: str, medusa: Medusa) -> None:
    done = medusa("generate", "Hi", "-m", "no-model", flag, name)
    told(done, 1, "heads" if flag == "--heads" else "model")
    assert "MEDUSA_TRACEBACK" not in done.err
    assert len(done.err) < 1200


@pytest.mark.parametrize("flag", ["--dataset", "--output-dir"])
def test_a_home_folder_of_nobody_is_no_bug(flag: str, medusa: Medusa, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    told(medusa("train-heads", "-m", "/no/such/model", "-o", tmp_path / "run", flag, "~nobody-here/x.jsonl"), 1)


# --- the model's files ---


def test_a_config_whose_window_is_no_number_is_refused(ask: Callable[..., Done], tiny: Path, tmp_path: Path) -> None:
    folder = copied(tiny, tmp_path / "model")
    changed(folder / "config.json", model_type="mistral", sliding_window="wide")
    told(ask("Hi", "-m", folder), 1)


@pytest.mark.parametrize("ids", ["x", [1.5], -3])
def test_a_stop_that_is_no_token_is_refused(ids: Any, ask: Callable[..., Done], tiny: Path, tmp_path: Path) -> None:
    folder = copied(tiny, tmp_path / "model")
    changed(folder / "generation_config.json", eos_token_id=ids)
    told(ask("Hi", "-m", folder), 1, "eos_token_id")


# --- the files of heads ---


def test_a_description_nested_without_end_is_damaged(ask: Callable[..., Done], heads: Path, tmp_path: Path) -> None:
    folder = copied(heads, tmp_path / "heads")
    (folder / "heads.json").write_text(DEEP)
    told(ask("Hi", "--heads", folder), 1, "heads.json is damaged")


@pytest.mark.parametrize("size", [10**5, 10**9, 10**30])
def test_a_description_of_giant_heads_allocates_nothing(
    size: int, ask: Callable[..., Done], heads: Path, tmp_path: Path
) -> None:
    folder = copied(heads, tmp_path / "heads")
    config = json.loads((folder / "heads.json").read_text())["config"]
    changed(folder / "heads.json", config=config | {"hidden_size": size})
    told(ask("Hi", "--heads", folder), 1, "heads.json")


def test_weights_that_are_whole_numbers_are_refused(ask: Callable[..., Done], heads: Path, tmp_path: Path) -> None:
    import hashlib

    folder = copied(heads, tmp_path / "heads")
    file = folder / "heads.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "weight": tensors["weight"].to(torch.int8)}, file)
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    changed(folder / "heads.json", bytes=file.stat().st_size, sha256=sha256)
    told(ask("Hi", "--heads", folder), 1, "whole numbers")


def test_a_step_cost_of_more_nodes_than_any_number_is_told(medusa: Medusa, heads: Path, tmp_path: Path) -> None:
    folder = copied(heads, tmp_path / "heads")
    changed(folder / "accuracy.json", step_cost={"1": 1.0, "9" * 400: 1.0})
    told(medusa("inspect-tree", "--heads", folder), 1, "step_cost")


def test_a_tree_file_that_never_ends_is_too_big(medusa: Medusa) -> None:
    told(medusa("inspect-tree", "--tree", "/dev/zero"), 1, "too big for a tree")


# --- prompts ---


def test_half_a_character_is_no_prompt(ask: Callable[..., Done], tiny: Path, heads: Path, tmp_path: Path) -> None:
    told(ask("caf\udce9"), 1, "not UTF-8")
    told(ask("Hi", "--system-prompt", "caf\udce9"), 1, "not UTF-8")
    (tmp_path / "half.jsonl").write_text('{"prompt": "\\ud800"}\n')
    told(run_here("bench", "-m", tiny, "--heads", heads, "--prompts", tmp_path / "half.jsonl", "-q"), 1, "surrogate")


@pytest.mark.parametrize("line", [DEEP, '{"prompt": "Hi", "id": ' + "9" * 6000 + "}"])
def test_bench_prompts_that_only_break_the_reader_are_no_bug(
    line: str, tiny: Path, heads: Path, tmp_path: Path
) -> None:
    (tmp_path / "odd.jsonl").write_text(line)
    told(run_here("bench", "-m", tiny, "--heads", heads, "--prompts", tmp_path / "odd.jsonl", "-q"), 1, "not JSON")


def test_bench_prompts_may_hold_line_separators_and_a_byte_order_mark(tiny: Path, heads: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + '{"prompt": "Hi\u2028there\x85"}\r\n'.encode())
    args = ("-m", tiny, "--heads", heads, "--dtype", "float32", "--prompts", file, "-n", 2, "-q", "--json")
    done = run_here("bench", *args)
    assert done.code == 0, done.err


# --- streams ---


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The program in a shell line."""
    program = f"{sys.executable} -m medusa_cli"
    return subprocess.run(
        line.replace("MEDUSA", program),
        shell=True, capture_output=True, text=True, cwd=ROOT, env=os.environ | environment, encoding="utf-8",
    )  # fmt: skip


def test_closed_streams_are_no_bug() -> None:
    done = shell("MEDUSA inspect-tree --tree 2x1 >&-")
    assert (done.returncode, done.stderr) == (0, "")
    done = shell("MEDUSA inspect-tree --tree nothing 2>&-")
    assert (done.returncode, done.stdout) == (1, "")


def test_a_prompt_from_a_closed_stdin_is_empty(tiny: Path) -> None:
    done = shell(f"MEDUSA generate - -q -m {tiny} <&-")
    told(Done(done.returncode, done.stdout, done.stderr), 1, "the prompt is empty")


def test_an_output_that_knows_no_such_character_shows_another() -> None:
    done = shell("MEDUSA inspect-tree --tree 2x1", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "?" in done.stdout
