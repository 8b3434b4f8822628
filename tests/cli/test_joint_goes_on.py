"""`medusa train-heads` with a section lora, stopped at any stage: it goes on, and ends as if nothing had happened."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from medusa_cli.cli.training_progress import Watch
from medusa_cli.pipeline import run as heads_module
from medusa_cli.train.joint.events import JointEvent
from medusa_cli.train.store import HiddenStore, Sample
from tests.cli.harness import ALONE, Done, Medusa, joint_args, train_args


def test_a_run_of_heads_alone_goes_on_with_an_adapter_and_ends_as_if_it_had_one_from_the_start(
    joint: tuple[Path, Done], medusa: Medusa, tiny: Path, tmp_path: Path
) -> None:
    assert medusa(*train_args(tiny, tmp_path / "run", *ALONE)).code == 0
    done = medusa(*joint_args(tiny, tmp_path / "run", "--resume-from-checkpoint"))
    assert done.code == 0, done.err
    for file in ("heads.safetensors", "adapter/adapter_model.safetensors"):
        assert (tmp_path / "run" / file).read_bytes() == (joint[0] / file).read_bytes()


def test_a_finished_run_goes_on_to_the_same_folder(
    joint: tuple[Path, Done], medusa: Medusa, tiny: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(joint[0], tmp_path / "copy")
    args = joint_args(tiny, folder, "--resume-from-checkpoint")
    done = medusa(*args, "lora.gradient_checkpointing=true")
    assert done.code == 0, done.err
    for file in ("heads.safetensors", "adapter/adapter_model.safetensors", "adapter/adapter_config.json"):
        assert (folder / file).read_bytes() == (joint[0] / file).read_bytes()
    refused = medusa(*args, "lora.alpha=3")
    assert refused.code == 1
    assert "was adapted with other settings: lora.alpha" in refused.err


def at_step_six(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_joint(self: object, event: JointEvent) -> None:
        if (event.kind, event.step) == ("train", 6):
            raise KeyboardInterrupt

    monkeypatch.setattr(Watch, "on_joint", on_joint)


def between_adapter_and_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_heads(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(heads_module, "write_heads", write_heads)


def among_the_adapted_model_s_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    real = HiddenStore.append

    def append(self: HiddenStore, sample: Sample) -> None:
        real(self, sample)
        if "joint" in self.folder.parts:
            raise KeyboardInterrupt

    monkeypatch.setattr(HiddenStore, "append", append)


@pytest.mark.parametrize("stop", [at_step_six, among_the_adapted_model_s_answers, between_adapter_and_heads])
def test_a_run_that_is_stopped_goes_on_to_the_same_files(
    joint: tuple[Path, Done],
    medusa: Medusa,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stop: Callable[[pytest.MonkeyPatch], None],
) -> None:
    args = joint_args(tiny, tmp_path / "run", "--save-steps", 4)
    with monkeypatch.context() as patched:
        stop(patched)
        stopped = medusa(*args)
    assert stopped.code != 0
    assert "--resume-from-checkpoint" in stopped.err
    assert not (tmp_path / "run" / "heads.json").exists()
    done = medusa(*args, "--resume-from-checkpoint")
    assert done.code == 0, done.err
    for file in ("heads.safetensors", "adapter/adapter_model.safetensors"):
        assert (tmp_path / "run" / file).read_bytes() == (joint[0] / file).read_bytes()


def test_a_signal_lets_the_step_of_heads_and_adapter_end_and_saves_it(
    joint: tuple[Path, Done], medusa: Medusa, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    args = joint_args(tiny, run, "--save-steps", 4)

    def on_joint(self: object, event: JointEvent) -> None:
        if (event.kind, event.step) == ("train", 6):
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(Watch, "on_joint", on_joint)
        stopped = medusa(*args)
    assert stopped.code == 128 + signal.SIGTERM
    assert "--resume-from-checkpoint" in stopped.err
    assert {file.name for file in (run / "joint" / "checkpoints").iterdir()} == {
        "step-00000004.pt",
        "step-00000006.pt",
    }
    done = medusa(*args, "--resume-from-checkpoint")
    assert done.code == 0, done.err
    for file in ("heads.safetensors", "adapter/adapter_model.safetensors"):
        assert (run / file).read_bytes() == (joint[0] / file).read_bytes()
