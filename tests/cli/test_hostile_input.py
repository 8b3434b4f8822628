"""What a user hardly means to give: closed streams, names that are none, files that lie about their content."""

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

from tests.cli.harness import ROOT, Done, Medusa, run_here, train_args
from tests.cli.test_bad_input import assert_told

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
    assert_told(done, 1, "heads" if flag == "--heads" else "model")
    assert "MEDUSA_TRACEBACK" not in done.err
    assert len(done.err) < 1200


@pytest.mark.parametrize("flag", ["--dataset", "--output-dir"])
def test_a_home_folder_of_nobody_is_no_bug(flag: str, medusa: Medusa, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert_told(medusa("train-heads", "-m", "/no/such/model", "-o", tmp_path / "run", flag, "~nobody-here/x.jsonl"), 1)


# --- the model's files ---


def test_a_config_whose_window_is_no_number_is_refused(ask: Callable[..., Done], tiny: Path, tmp_path: Path) -> None:
    folder = copied(tiny, tmp_path / "model")
    changed(folder / "config.json", model_type="mistral", sliding_window="wide")
    assert_told(ask("Hi", "-m", folder), 1)


@pytest.mark.parametrize("ids", ["x", [1.5], -3])
def test_a_stop_that_is_no_token_is_refused(ids: Any, ask: Callable[..., Done], tiny: Path, tmp_path: Path) -> None:
    folder = copied(tiny, tmp_path / "model")
    changed(folder / "generation_config.json", eos_token_id=ids)
    assert_told(ask("Hi", "-m", folder), 1, "eos_token_id")


# --- the files of heads ---


def test_a_description_nested_without_end_is_damaged(ask: Callable[..., Done], heads: Path, tmp_path: Path) -> None:
    folder = copied(heads, tmp_path / "heads")
    (folder / "heads.json").write_text(DEEP)
    assert_told(ask("Hi", "--heads", folder), 1, "heads.json is damaged")


@pytest.mark.parametrize("size", [10**5, 10**9, 10**30])
def test_a_description_of_giant_heads_allocates_nothing(
    size: int, ask: Callable[..., Done], heads: Path, tmp_path: Path
) -> None:
    folder = copied(heads, tmp_path / "heads")
    config = json.loads((folder / "heads.json").read_text())["config"]
    changed(folder / "heads.json", config=config | {"hidden_size": size})
    assert_told(ask("Hi", "--heads", folder), 1, "heads.json")


def test_weights_that_are_whole_numbers_are_refused(ask: Callable[..., Done], heads: Path, tmp_path: Path) -> None:
    import hashlib

    folder = copied(heads, tmp_path / "heads")
    file = folder / "heads.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "weight": tensors["weight"].to(torch.int8)}, file)
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    changed(folder / "heads.json", bytes=file.stat().st_size, sha256=sha256)
    assert_told(ask("Hi", "--heads", folder), 1, "whole numbers")


def test_a_step_cost_of_more_nodes_than_any_number_is_told(medusa: Medusa, heads: Path, tmp_path: Path) -> None:
    folder = copied(heads, tmp_path / "heads")
    changed(folder / "accuracy.json", step_cost={"1": 1.0, "9" * 400: 1.0})
    assert_told(medusa("inspect-tree", "--heads", folder), 1, "step_cost")


def test_a_tree_file_that_never_ends_is_too_big(medusa: Medusa) -> None:
    assert_told(medusa("inspect-tree", "--tree", "/dev/zero"), 1, "too big for a tree")


# --- prompts ---


def test_half_a_character_is_no_prompt(ask: Callable[..., Done], tiny: Path, heads: Path, tmp_path: Path) -> None:
    assert_told(ask("caf\udce9"), 1, "not UTF-8")
    assert_told(ask("Hi", "--system-prompt", "caf\udce9"), 1, "not UTF-8")
    (tmp_path / "half.jsonl").write_text('{"prompt": "\\ud800"}\n')
    assert_told(
        run_here("bench", "-m", tiny, "--heads", heads, "--prompts", tmp_path / "half.jsonl", "-q"), 1, "surrogate"
    )


@pytest.mark.parametrize("line", [DEEP, '{"prompt": "Hi", "id": ' + "9" * 6000 + "}"])
def test_bench_prompts_that_only_break_the_reader_are_no_bug(
    line: str, tiny: Path, heads: Path, tmp_path: Path
) -> None:
    (tmp_path / "odd.jsonl").write_text(line)
    assert_told(
        run_here("bench", "-m", tiny, "--heads", heads, "--prompts", tmp_path / "odd.jsonl", "-q"), 1, "broken JSON"
    )


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
    assert_told(Done(done.returncode, done.stdout, done.stderr), 1, "the prompt is empty")


def test_an_output_that_knows_no_such_character_shows_another() -> None:
    done = shell("MEDUSA inspect-tree --tree 2x1", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "?" in done.stdout


def test_a_token_the_model_lacks_is_told(ask: Callable[..., Done], tiny: Path, tmp_path: Path) -> None:
    folder = copied(tiny, tmp_path / "model")
    file = folder / "tokenizer.json"
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    first = len(json.loads(file.read_text())["model"]["vocab"])
    added = json.loads(file.read_text())["added_tokens"]
    more = [{"id": first + number, "content": f"<x{number}>", **flags} for number in range(40)]
    changed(file, added_tokens=added + more)
    assert_told(ask("<x39>", "-m", folder), 1, "beyond the 304 embeddings")


def test_a_chat_without_a_template_is_refused(ask: Callable[..., Done], tiny: Path, tmp_path: Path) -> None:
    folder = copied(tiny, tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    assert_told(ask("Hi", "-m", folder, "--chat"), 1, "has no chat template")


@pytest.mark.parametrize("text", ["[" * 5000, "seed: 2020-13-45"])
def test_a_recipe_that_breaks_the_reader_is_no_bug(text: str, medusa: Medusa, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    assert_told(medusa("train-heads", "-c", tmp_path / "recipe.yaml"), 1, "recipe.yaml")
    assert_told(medusa("train-heads", f"data.rows={text.removeprefix('seed: ')}", "-m", "/no/model"), 1)


# --- numbers ---


@pytest.mark.parametrize(
    ("code", "flags"),
    [
        (2, ("--temperature", "1e-320")),
        (1, ("--seed", 2**64)),
        (1, ("--seed", -(2**70))),
    ],
)
def test_a_number_that_no_arithmetic_takes_is_refused(code: int, flags: Any, ask: Callable[..., Done]) -> None:
    assert_told(ask("Hi", *flags), code, flags[0].strip("-"))


@pytest.mark.parametrize("flags", [("--top-p", "1e-300"), ("--temperature", "1e-5"), ("--temperature", "1e300")])
def test_an_extreme_share_or_temperature_still_samples(flags: Any, ask: Callable[..., Done]) -> None:
    done = ask("Hi", "--temperature", 1, *flags)
    assert done.code == 0, done.err


@pytest.mark.parametrize("flag", ["--epochs", "--learning-rate", "--warmup-ratio"])
@pytest.mark.parametrize("value", ["inf", "nan"])
def test_training_settings_are_finite(flag: str, value: str, medusa: Medusa, tmp_path: Path) -> None:
    assert_told(medusa("train-heads", "-m", "/no/such/model", "-o", tmp_path / "run", flag, value), 1, "finite")


def test_heads_that_learnt_too_fast_to_be_stored_replace_nothing(medusa: Medusa, tiny: Path, tmp_path: Path) -> None:
    args = train_args(tiny, tmp_path, "--learning-rate", 1e9, "--max-steps", 1, "-q")
    assert_told(medusa(*args), 1, "float16", "--learning-rate")
    assert not (tmp_path / "heads.safetensors").exists()


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_a_gate_that_nothing_could_pass_or_fail_is_refused(value: str, medusa: Medusa) -> None:
    assert_told(medusa("bench", "-m", "/no/such/model", "--min-speedup", value), 2, "--min-speedup")


# --- where results go ---


def test_a_result_goes_through_a_link_and_into_a_pipe_and_replaces_neither(medusa: Medusa, tmp_path: Path) -> None:
    link, pipe = tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to(tmp_path / "real.json")
    for flag in ("--output-json", "--output"):
        assert medusa("inspect-tree", "--tree", "2x1", flag, link).code == 0
        assert link.is_symlink()
        assert json.loads((tmp_path / "real.json").read_text())
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert medusa("inspect-tree", "--tree", "2x1", "--output-json", pipe).code == 0
    assert pipe.is_fifo()
    assert json.loads(os.read(reader, 1_000_000))
    os.close(reader)


@pytest.mark.parametrize("name", ["folder.png", "locked/x.png"])
def test_a_picture_that_can_not_be_written_is_told_before_the_model_is_loaded(
    name: str, medusa: Medusa, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "locked").mkdir()
    # root may write anywhere: what the system answers is given here
    monkeypatch.setattr(os, "access", lambda place, mode: "locked" not in str(place))
    assert_told(medusa("bench", "-m", "/no/such/model", "--plot", tmp_path / name), 1, "can't write")
