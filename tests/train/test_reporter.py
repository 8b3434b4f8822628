"""Curves to Weights & Biases: the real package without a network, and what is said when it can't start."""

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from medusa_cli.config.recipe import TrainSettings
from medusa_cli.errors import MissingExtra, TrainingError
from medusa_cli.train.checkpoint import TrainLog
from medusa_cli.train.early_stopping import Decoded
from medusa_cli.train.events import Outlets
from medusa_cli.train.loop import Sets, train
from medusa_cli.train.reporter import WandbReporter

_BLOCK, _FILE_HEADER, _HEADER = 32768, 7, 7


def records_of(file: Path) -> Iterator[bytes]:
    """The records of a run's file: LevelDB's log format behind a header of 7 bytes."""
    content, at, parts = file.read_bytes(), _FILE_HEADER, []
    while at + _HEADER <= len(content):
        if _BLOCK - at % _BLOCK < _HEADER:
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + _HEADER])
        parts.append(content[at + _HEADER : at + _HEADER + length])
        at += _HEADER + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def history_of(folder: Path) -> list[dict[str, Any]]:
    """What was logged in the one run that is kept in ./wandb of this folder, a mapping for each step."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    rows = []
    for content in records_of(file):
        record = Record()
        record.ParseFromString(content)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
    return rows


def settings(**changes) -> TrainSettings:
    return TrainSettings(**{"batch_size": 32, "loss_chunk": 16, "max_steps": 2, "epochs": 100, **changes})


def decoding(sets: Sets) -> Sets:
    return Sets(sets.train, sets.held_out, lambda heads: Decoded(1.5, 1.25))


def test_a_reporter_gets_flat_numbers_of_steps_evaluations_and_decodes(
    make_heads, sets, tmp_path, make_run, monkeypatch
):
    logged, ended = [], []
    run = SimpleNamespace(log=lambda values, step: logged.append((step, values)), finish=lambda: ended.append("run"))
    wandb = SimpleNamespace(
        setup=lambda _: None,
        init=lambda **_: run,
        teardown=lambda: ended.append("helper"),
        Settings=SimpleNamespace,
        Error=ValueError,
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    reporter = WandbReporter("project", {"seed": 0})
    outlets = Outlets(lambda _: None, TrainLog(tmp_path), reporter)
    train(make_heads(), decoding(sets), settings(), 0, make_run().checkpoints, outlets)
    reporter.close()
    assert [step for step, _ in logged] == [1, 2, 2, 2]
    assert set(logged[0][1]) >= {"train/loss", "train/learning_rate", "train/loss_head_1", "train/top1_head_3"}
    assert logged[2][1] == {"decode/tokens_per_step": 1.5, "decode/speedup": 1.25}
    assert {"eval/top1_head_1", "eval/conditional_head_3"} <= set(logged[3][1])
    assert ended == ["run", "helper"], "what is logged is written when the helper process has ended"


def test_without_a_network_everything_is_kept_in_a_folder_and_can_be_read_back(
    make_heads, sets, tmp_path, make_run, monkeypatch
):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    reporter, run = WandbReporter("project", {"seed": 0}), make_run()
    outlets = Outlets(run.events.append, TrainLog(tmp_path), reporter)
    train(make_heads(), decoding(sets), settings(), 0, run.checkpoints, outlets)
    reporter.close()
    rows = history_of(tmp_path)
    assert [row["_step"] for row in rows] == [1, 2]
    losses = [event.loss for event in run.events if event.kind == "train"]
    assert [row["train/loss"] for row in rows] == pytest.approx(losses)
    assert (rows[1]["decode/tokens_per_step"], rows[1]["decode/speedup"]) == (1.5, 1.25)
    assert rows[1]["eval/conditional_head_1"] == pytest.approx(run.events[-2].conditional_K[0])


def test_a_missing_key_is_an_error_and_nothing_is_asked_even_on_a_terminal(tmp_path):
    pytest.importorskip("wandb")
    program = (
        "import sys; sys.stdin.isatty = sys.stderr.isatty = sys.stdout.isatty = lambda: True\n"
        "from medusa_cli.errors import TrainingError\n"
        "from medusa_cli.train.reporter import WandbReporter\n"
        "try: WandbReporter('project', {})\n"
        "except TrainingError as error: print(error.message, '|', error.hint)\n"
    )
    root = Path(__file__).parents[2]
    surroundings = {"HOME": str(tmp_path), "WANDB_DIR": str(tmp_path), "PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=surroundings, input="", capture_output=True, text=True
    )
    assert "Weights & Biases can't start: No API key configured" in done.stdout, done.stderr
    assert "WANDB_MODE=offline" in done.stdout


@pytest.mark.parametrize("kind", [ValueError, TimeoutError])
def test_a_reporter_that_can_t_start_says_what_else_there_is(monkeypatch, kind):
    def init(**_):
        raise kind("no account")

    wandb = SimpleNamespace(
        setup=lambda _: None, init=init, teardown=lambda: None, Settings=SimpleNamespace, Error=ValueError
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with pytest.raises(TrainingError, match="can't start: no account") as caught:
        WandbReporter("project", {})
    assert "WANDB_MODE=offline" in caught.value.hint


def test_a_run_that_can_t_start_leaves_no_folder_but_those_of_others(monkeypatch, tmp_path):
    def init(*, id, **_):
        (tmp_path / "wandb" / f"run-20260101_000000-{id}").mkdir(parents=True)
        (tmp_path / "wandb" / "latest-run").symlink_to(f"run-20260101_000000-{id}")
        raise ValueError("no key")

    wandb = SimpleNamespace(
        setup=lambda _: None, init=init, teardown=lambda: None, Settings=SimpleNamespace, Error=ValueError
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    with pytest.raises(TrainingError, match="no key"):
        WandbReporter("project", {})
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "wandb/run-20250101_000000-theirs").mkdir(parents=True)
    with pytest.raises(TrainingError, match="no key"):
        WandbReporter("project", {})
    assert [each.name for each in (tmp_path / "wandb").iterdir()] == ["run-20250101_000000-theirs"]


def test_a_missing_reporter_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtra) as caught:
        WandbReporter("project", {})
    assert "[wandb]" in caught.value.hint
