"""What is remembered of a model belongs to its weight files: a copy, or one written over, is checked again."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from medusa_cli.config.recipe import TargetSettings
from medusa_cli.errors import TargetError
from medusa_cli.model.loading.huggingface import weights_identity
from medusa_cli.model.loading.load import load_target, load_unchecked
from medusa_cli.model.loading.sources import Source
from tests.tiny_folders import save_gguf, save_tiny


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    return save_tiny(tmp_path / "model")


def settings_of(folder: Path) -> TargetSettings:
    return TargetSettings(model=str(folder), device="cpu")


def break_a_row(folder: Path) -> None:
    """One row of the output matrix becomes infinite: none of the numbers that a fingerprint samples."""
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][50] = float("inf")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_weights_that_changed_after_their_check_are_checked_again(folder: Path) -> None:
    before = load_target(settings_of(folder))
    break_a_row(folder)
    assert load_unchecked(settings_of(folder)).fingerprint == before.fingerprint
    with pytest.raises(TargetError, match="logits are not finite"):
        load_target(settings_of(folder))


def test_a_damaged_copy_is_no_model_that_was_checked(folder: Path, tmp_path: Path) -> None:
    load_target(settings_of(folder))
    copied = Path(shutil.copytree(folder, tmp_path / "copied"))
    break_a_row(copied)
    with pytest.raises(TargetError, match="logits are not finite"):
        load_target(settings_of(copied))


def test_files_are_told_apart_by_what_a_copy_or_a_write_changes(folder: Path, tmp_path: Path) -> None:
    def identity(path: Path) -> str | None:
        return weights_identity(Source("tiny", str(path)), None)

    first = identity(folder)
    assert first == identity(folder)
    assert first == identity(folder / ".." / folder.name)
    copied = Path(shutil.copytree(folder, tmp_path / "copied"))
    assert identity(copied) != first
    file = folder / "model.safetensors"
    about = file.stat()
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns + 1))
    assert identity(folder) != first
    gguf = save_gguf(tmp_path / "tiny.gguf")
    assert weights_identity(Source("tiny", str(tmp_path), gguf.name), None) is not None
    assert weights_identity(Source("tiny", "someone/never-downloaded"), None) is None


class Evil:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (os.environ["EVIL"],)


@pytest.mark.parametrize(
    ("content", "message", "hint"),
    [
        (Evil, "a pickle that asks for more than numbers", ".safetensors files"),
        (dict, None, "copy or download"),
        (None, "none of torch's", "copy or download"),
    ],
)
def test_pickled_weights_that_are_refused_come_with_no_advice_to_trust_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, content: Any, message: str | None, hint: str
) -> None:
    monkeypatch.setenv("EVIL", str(folder / "ran"))
    (folder / "model.safetensors").unlink()
    if content is None:
        (folder / "pytorch_model.bin").write_bytes(b"<html></html>")
    else:
        torch.save({"lm_head.weight": content()}, folder / "pytorch_model.bin")
    with pytest.raises(TargetError) as failed:
        load_target(settings_of(folder))
    assert message is None or message in failed.value.message
    assert hint in failed.value.hint
    assert "weights_only" not in failed.value.message + failed.value.hint
    assert not (folder / "ran").exists()
