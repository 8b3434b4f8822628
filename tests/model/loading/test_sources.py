"""Where a model is, and what is refused before any weight is read."""

from pathlib import Path

import pytest

from medusa_cli.errors import TargetError
from medusa_cli.model.loading.sources import Source, find_source, known_names
from tests.tiny_folders import save_gguf, save_tiny


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


@pytest.mark.parametrize("what", ["a folder", "a file", "heads", "no weights", "a broken config"])
def test_what_is_no_model_does_not_hide_an_alias(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO")
    here = tmp_path / "llama-2-7b"
    if what == "a file":
        here.write_text("notes on large models")
    else:
        here.mkdir()
    inner = {"heads": ("heads.json", "{}"), "no weights": ("config.json", '{"model_type": "llama"}')}
    if what in inner or what == "a broken config":
        name, text = inner.get(what, ("config.json", "{"))
        (here / name).write_text(text)
    assert find_source("llama-2-7b").location == "meta-llama/Llama-2-7b-hf"
    (line,) = caplog.messages
    assert line.startswith("llama-2-7b is the alias here: ")
    with pytest.raises(TargetError):
        find_source("./llama-2-7b")


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
