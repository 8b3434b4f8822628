"""`torchrun … -m medusa_cli train-heads`: real processes that learn together on the CPU."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.cli.harness import ROOT, Medusa, kill_group, train_args

TORCHRUN = (
    "-m",
    "torch.distributed.run",
    "--nproc-per-node",
    "2",
    "--rdzv-backend",
    "c10d",
    "--rdzv-endpoint",
    "127.0.0.1:0",
)
ACCELERATE = (
    "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
    "--main_process_port", "0", "--mixed_precision", "no", "--dynamo_backend", "no",
)  # fmt: skip
PATIENCE_S = 600

Launch = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def launch() -> Iterator[Launch]:
    """Starts two processes of the program; nothing of them outlives the test."""
    started = []

    def begin(launcher: Sequence[str], *args: object) -> subprocess.Popen[str]:
        command = [sys.executable, *launcher, "-m", "medusa_cli", *map(str, args)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, text=True, cwd=ROOT, env=os.environ.copy(), start_new_session=True, **pipes)
        started.append(process)
        return process

    yield begin
    for process in started:
        for pid in workers_of(process).values():
            os.kill(pid, signal.SIGKILL)
        kill_group(process)


def workers_of(launcher: subprocess.Popen[str]) -> dict[int, int]:
    """Process ids by rank; a launcher gives each worker a session of its own."""
    found = {}
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    for pid in children.read_text().split() if children.exists() else ():
        surroundings = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        ranks = [int(one[5:]) for one in surroundings if one.startswith(b"RANK=")]
        found |= {rank: int(pid) for rank in ranks}
    return found


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in map(json.loads, (folder / "train.jsonl").open()) if "loss" in line]


def assert_same_heads(one: Path, other: Path) -> None:
    ours, theirs = load_file(one / "heads.safetensors"), load_file(other / "heads.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        np.testing.assert_allclose(tensor.float(), theirs[name].float(), rtol=2e-2, atol=2e-4)
    assert any(tensor.float().abs().max() > 2e-3 for name, tensor in ours.items() if name != "draft_ids")


def errors_in(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error:")]


def test_two_processes_learn_what_one_does_and_one_goes_on_where_two_stopped(
    launch: Launch, medusa: Medusa, tiny: Path, data: Path, tmp_path: Path
) -> None:
    def args(folder: str, *more: object) -> Sequence[object]:
        steps = ("--max-steps", 8, "--save-steps", 4, "--eval-steps", 4, "train.micro_batch_size=10")
        return train_args(tiny, tmp_path / folder, "--dataset", data, "--json", "-q", *steps, *more)

    two = launch(TORCHRUN, *args("two"))
    out, err = two.communicate(timeout=PATIENCE_S)
    assert two.returncode == 0, err
    assert json.loads(out)["positions"] > 0
    done = medusa(*args("one"))
    assert done.code == 0, done.err
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert_same_heads(tmp_path / "one", tmp_path / "two")

    shutil.copytree(tmp_path / "two", tmp_path / "on")
    (tmp_path / "on" / "checkpoints" / "step-00000008.pt").unlink()
    (tmp_path / "on" / "heads.safetensors").unlink()
    resumed = medusa(*args("on", "--resume-from-checkpoint"))
    assert resumed.code == 0, resumed.err
    assert losses(tmp_path / "on") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert_same_heads(tmp_path / "one", tmp_path / "on")

    # states that are no numbers: all stop, and the first one says where
    shutil.rmtree(tmp_path / "on" / "checkpoints")
    states = np.memmap(tmp_path / "on" / "written" / "read" / "hidden.f16", np.float16, "r+")
    states[:] = np.nan
    states.flush()
    index = tmp_path / "on" / "written" / "read" / "samples.jsonl"
    samples = [json.loads(line) for line in index.read_text().splitlines()]
    # without the sums that would tell of it earlier, as folders had none once
    for sample in samples:
        del sample["crc32"]
    index.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    bad = launch(TORCHRUN, *args("on", "--resume-from-checkpoint"))
    _, err = bad.communicate(timeout=PATIENCE_S)
    assert bad.returncode != 0
    (error,) = errors_in(err)
    assert error.startswith("error: step 1: the loss is not finite on ")


def test_two_processes_learn_a_block_as_one_does(
    launch: Launch, medusa: Medusa, tiny: Path, data: Path, tmp_path: Path
) -> None:
    def args(folder: str) -> Sequence[object]:
        steps = ("--heads-type", "block", "--max-steps", 4, "--eval-steps", 4, "train.batch_size=13")
        return train_args(tiny, tmp_path / folder, "--dataset", data, "--json", "-q", *steps)

    two = launch(TORCHRUN, *args("two"))
    _, err = two.communicate(timeout=PATIENCE_S)
    assert two.returncode == 0, err
    assert medusa(*args("one")).code == 0
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    assert_same_heads(tmp_path / "one", tmp_path / "two")


def test_rerun_states_are_refused_where_processes_learn_together(launch: Launch, tiny: Path, tmp_path: Path) -> None:
    two = launch(TORCHRUN, *train_args(tiny, tmp_path / "run", "--heads-type", "block", "train.states=rerun"))
    _, err = two.communicate(timeout=PATIENCE_S)
    assert two.returncode != 0
    # the launcher may end the first process, which speaks for both, before it has spoken
    assert all("one process holds the model, and 2 were launched" in line for line in errors_in(err))
    assert not (tmp_path / "run" / "heads.safetensors").exists()


def test_when_one_process_dies_all_end_and_the_first_says_so(
    launch: Launch, tiny: Path, data: Path, tmp_path: Path
) -> None:
    endless = ("--epochs", 10**6, "--max-steps", 10**6, "--dataset", data, "-q")
    process = launch(ACCELERATE, *train_args(tiny, tmp_path / "run", *endless))
    log, end = tmp_path / "run" / "train.jsonl", time.monotonic() + PATIENCE_S
    while not (log.exists() and log.read_text().count("\n") > 12):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.2)
    workers = workers_of(process)
    os.kill(workers[1], signal.SIGKILL)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode != 0
    (error,) = errors_in(err)  # which it is depends on who notices first: the first process, or the launcher
    assert error in (
        "error: one of the 2 training processes has ended",
        "error: the launcher ended all training processes (SIGTERM)",
    )
    assert "--resume-from-checkpoint goes on" in err
    assert not Path(f"/proc/{workers[0]}").exists()
    assert any((tmp_path / "run" / "checkpoints").iterdir())
