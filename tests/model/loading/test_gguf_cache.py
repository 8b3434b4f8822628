"""A user's GGUF file is converted once, as the embedded one is, by what it holds; a disk without room goes without."""

import logging
from collections import Counter, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from medusa_cli.config.recipe import TargetSettings
from medusa_cli.model.loading import gguf_cache, gguf_conversion
from medusa_cli.model.loading.gguf_library import read_once
from medusa_cli.model.loading.huggingface import fetch_model, fetch_tokenizer
from medusa_cli.model.loading.load import load_unchecked
from medusa_cli.model.loading.sources import find_source
from medusa_cli.model.target import Target
from tests.tiny_folders import save_gguf

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Target]:
    """Loads a file with a home of its own."""
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir(mode=0o700)
    return lambda file: load_unchecked(TargetSettings(model=str(file), device="cpu", dtype="float32"))


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what is converted."""
    made: list[str] = []
    real = gguf_conversion.fetch_model

    def fetch(source: Any, *rest: Any) -> Any:
        made.append(source.name)
        return real(source, *rest)

    monkeypatch.setattr(gguf_conversion, "fetch_model", fetch)
    return made


def test_a_file_is_converted_once_and_stays_the_same_model(
    load: Callable[..., Target], conversions: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = save_gguf(tmp_path / "tiny.gguf")
    first, again = load(file), load(file)
    assert conversions == [str(file)]
    assert first.fingerprint == again.fingerprint
    assert first.name == again.name == str(file)
    moved = file.rename(tmp_path / "moved.gguf")
    load(moved.rename(tmp_path / "tiny.gguf"))
    assert conversions == [str(file)], "it goes by what the file holds"
    said = capsys.readouterr().err.splitlines()
    assert all(line.startswith("converting ") for line in said), "no bar of the library's"


def test_a_file_is_parsed_once_and_its_names_are_mapped_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: Counter[str] = Counter()

    def counts(name: str) -> Callable[..., Any]:
        inner = getattr(gguf, name)
        return lambda *given: (counted.update([name]), inner(*given))[1]

    for name in ("GGUFReader", "get_tensor_name_map"):
        monkeypatch.setattr(gguf, name, counts(name))
    source = find_source(str(save_gguf(tmp_path / "tiny.gguf")))
    with read_once():
        fetch_tokenizer(source, None)
        fetch_model(source, None, torch.float32, "eager")
    assert counted == {"GGUFReader": 1, "get_tensor_name_map": 1}


def test_another_file_of_that_name_is_another_model(
    load: Callable[..., Target], conversions: list[str], tmp_path: Path
) -> None:
    file = save_gguf(tmp_path / "tiny.gguf")
    before = load(file).fingerprint
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(bytes(content))
    load(file)
    assert len(conversions) == 2
    content[-2] ^= 1
    file.write_bytes(bytes(content))
    assert load(file).fingerprint == before
    assert len(conversions) == 2


def test_without_room_on_the_disk_it_is_loaded_as_it_is(
    load: Callable[..., Target],
    conversions: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = save_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(gguf_cache.shutil, "disk_usage", lambda _: Usage(0, 0, file.stat().st_size))
    with caplog.at_level(logging.INFO, "medusa_cli"):
        assert load(file).name == str(file)
    assert conversions == []
    assert "is converted at every start: a copy may take" in caplog.text


def test_a_home_that_can_not_be_written_is_no_reason_to_refuse_a_file(
    load: Callable[..., Target], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = save_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "home" / "models").write_text("")
    with caplog.at_level(logging.INFO, "medusa_cli"):
        assert load(file).name == str(file)
    assert "no copy can be kept in" in caplog.text
