"""The folder of heads: what is written is what is read, and nothing else is."""

import json
import os
import shutil
import struct
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import medusa_cli.formats.native as native
from medusa_cli.errors import FormatError, HeadsMismatch
from medusa_cli.formats.native import NativeFormat, write_heads
from medusa_cli.heads.medusa import MedusaHeads
from medusa_cli.heads.traits import Traits
from medusa_cli.registry import read_heads
from medusa_cli.util.sealed import sha256_of
from tests.tiny_heads import HIDDEN, REAL, FakeTarget, some_heads


def equal(one: MedusaHeads, other: MedusaHeads) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def independent_logits(folder, hidden: np.ndarray, output_weight: np.ndarray, root: int) -> np.ndarray:
    """The published layout read with json and struct alone: [K, W] logits for a state and the root it decided."""
    data = (folder / "heads.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    kinds = {"F32": np.float32, "I32": np.int32}

    def tensor(name: str) -> np.ndarray:
        entry = header[name]
        start, end = entry["data_offsets"]
        raw = data[8 + length + start : 8 + length + end]
        return np.frombuffer(raw, kinds[entry["dtype"]]).reshape(entry["shape"])

    weight, bias, ids = tensor("weight"), tensor("bias"), tensor("draft_ids")
    logits = []
    for head in range(weight.shape[1]):
        x = hidden
        for layer in range(weight.shape[0]):
            linear = weight[layer, head] @ x + bias[layer, head]
            if "root_weight" in header and layer == 0:
                row = output_weight[root]
                linear = linear + tensor("root_weight")[head] @ (row / np.sqrt((row**2).mean()))
            x = x + linear / (1 + np.exp(-linear))
        matrix = tensor("output_weight")[head] if "output_weight" in header else output_weight[ids]
        logits.append(matrix @ x)
    return np.stack(logits)


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("own_output", [False, True])
@pytest.mark.parametrize("output_bias", [False, True])
@pytest.mark.parametrize("sees_root", [False, True])
def test_heads_come_back_bit_equal(tmp_path, num_layers, own_output, output_bias, sees_root):
    heads = some_heads(num_layers=num_layers, own_output=own_output, output_bias=output_bias, sees_root=sees_root)
    write_heads(heads, tmp_path / "new" / "folder")
    back = NativeFormat().read(tmp_path / "new" / "folder")
    assert equal(heads, back)
    assert back.config == heads.config


def test_read_heads_are_bound_and_guess_what_the_written_ones_guess(tmp_path):
    heads = some_heads()
    write_heads(heads, tmp_path)
    hidden = torch.randn(4, HIDDEN)
    back = read_heads(tmp_path, FakeTarget())
    assert torch.equal(back(hidden), heads(hidden))
    assert not any(parameter.requires_grad for parameter in back.parameters())


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("own_output", [False, True])
@pytest.mark.parametrize("sees_root", [False, True])
def test_a_reader_written_to_the_published_layout_gets_the_same_logits(tmp_path, num_layers, own_output, sees_root):
    heads = some_heads(num_layers=num_layers, own_output=own_output, sees_root=sees_root)
    write_heads(heads, tmp_path)
    hidden, root = torch.randn(HIDDEN), 9
    theirs = independent_logits(tmp_path, hidden.numpy(), FakeTarget().output_weight.numpy(), root)
    ours = heads(heads.inputs(hidden, torch.tensor([root])))
    np.testing.assert_allclose(theirs, ours.detach().numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_heads_can_be_stored_in_half_the_bytes_and_used_in_the_target_s_dtype(tmp_path, dtype):
    heads = some_heads()
    write_heads(heads, tmp_path, dtype)
    assert torch.equal(NativeFormat().read(tmp_path).weight, heads.weight.to(dtype))
    assert read_heads(tmp_path, FakeTarget()).weight.dtype == torch.float32
    assert heads.weight.dtype == torch.float32


def test_only_a_folder_with_a_description_is_recognised(tmp_path):
    assert not NativeFormat().detect(tmp_path)
    write_heads(some_heads(), tmp_path)
    assert NativeFormat().detect(tmp_path)


def test_a_missing_folder_is_named_in_full(tmp_path):
    with pytest.raises(FormatError, match=f"{tmp_path / 'nowhere'}: no such folder") as caught:
        read_heads(tmp_path / "nowhere", FakeTarget())
    assert "--heads" in caught.value.hint


@pytest.mark.parametrize("name", ["heads.json", "heads.safetensors"])
def test_a_missing_file_is_named(tmp_path, name):
    write_heads(some_heads(), tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(FormatError, match=f"{name}.* is missing"):
        read_heads(tmp_path, FakeTarget())


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_truncated_numbers_are_an_error_at_any_length(tmp_path, kept):
    write_heads(some_heads(), tmp_path)
    file = tmp_path / "heads.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(FormatError, match="truncated"):
        read_heads(tmp_path, FakeTarget())


def test_one_changed_byte_is_an_error(tmp_path):
    write_heads(some_heads(), tmp_path)
    file = tmp_path / "heads.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(FormatError, match="checksum"):
        read_heads(tmp_path, FakeTarget())


def test_numbers_that_are_no_safetensors_are_an_error_even_with_the_right_checksum(tmp_path):
    write_heads(some_heads(), tmp_path)
    (tmp_path / "heads.safetensors").write_bytes(b"not tensors")
    change_description(tmp_path, bytes=11, sha256=sha256_of(tmp_path / "heads.safetensors"))
    with pytest.raises(FormatError, match="can't be read"):
        read_heads(tmp_path, FakeTarget())


def change_description(folder, **changes):
    file = folder / "heads.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "something else"}'])
def test_a_description_that_is_none_of_ours_is_an_error(tmp_path, text):
    write_heads(some_heads(), tmp_path)
    (tmp_path / "heads.json").write_text(text)
    with pytest.raises(FormatError, match=r"heads\.json"):
        read_heads(tmp_path, FakeTarget())


def test_an_unknown_version_says_which_is_known(tmp_path):
    write_heads(some_heads(), tmp_path)
    change_description(tmp_path, version=99)
    with pytest.raises(FormatError, match="version 99; this program reads version 1 and 2"):
        read_heads(tmp_path, FakeTarget())


@pytest.mark.parametrize(("field_name", "value"), [("num_heads", 2), ("num_heads", "many"), ("surprise", 1)])
def test_a_config_that_doesn_t_fit_the_numbers_is_an_error(tmp_path, field_name, value):
    write_heads(some_heads(), tmp_path)
    config = json.loads((tmp_path / "heads.json").read_text())["config"]
    change_description(tmp_path, config={**config, field_name: value})
    with pytest.raises(FormatError, match=r"weight|num_heads|surprise"):
        read_heads(tmp_path, FakeTarget())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 8}, "hidden size of 16"),
        ({"vocab_size": 49}, "vocabulary of 50"),
        ({"fingerprint": "xyz"}, "fingerprint abc"),
    ],
)
def test_heads_of_another_model_are_refused_with_the_difference(tmp_path, change, message):
    write_heads(some_heads(), tmp_path)
    with pytest.raises(HeadsMismatch, match=message) as caught:
        read_heads(tmp_path, FakeTarget(**change))
    assert "train heads for this one" in caught.value.hint


def test_heads_of_the_version_before_are_read_and_vouch_for_weights_alone(tmp_path, caplog):
    write_heads(some_heads(), tmp_path)
    change_description(tmp_path, version=1)
    assert equal(read_heads(tmp_path, FakeTarget(rows="others")), some_heads())
    assert not caplog.records


def test_what_heads_know_of_their_target_comes_back_and_is_compared(tmp_path, caplog):
    write_heads(some_heads(traits=Traits(rope={"rope_theta": 1e4}, rows="abc")), tmp_path)
    read_heads(tmp_path, FakeTarget(config=SimpleNamespace(rope_parameters={"rope_theta": 1e4}), rows="abc"))
    assert not caplog.records
    read_heads(tmp_path, FakeTarget(config=SimpleNamespace(rope_parameters={"rope_theta": 5e5}), rows="abd"))
    [warning] = caplog.messages
    assert "another rows of embeddings or output matrix, another rope_theta (10000.0 then, 500000.0 now)" in warning


def test_heads_that_would_draft_a_padding_row_are_refused(tmp_path):
    heads = some_heads()
    heads.draft_ids[-1] = REAL
    write_heads(heads, tmp_path)
    with pytest.raises(HeadsMismatch, match=f"would draft id {REAL}"):
        read_heads(tmp_path, FakeTarget())


@pytest.mark.parametrize("crash_at", ["save", "describe", "rename"])
def test_a_kill_at_any_moment_leaves_the_old_heads_or_the_new(tmp_path, monkeypatch, crash_at):
    old, new = some_heads(), some_heads(num_layers=2)
    write_heads(old, tmp_path)
    stop_writing_at(monkeypatch, crash_at, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        write_heads(new, tmp_path)
    monkeypatch.undo()
    assert equal(read_heads(tmp_path, FakeTarget()), new if crash_at == "rename" else old)


@pytest.mark.parametrize("crash_at", ["save", "describe", "rename"])
def test_a_second_kill_doesn_t_spoil_what_the_first_left(tmp_path, monkeypatch, crash_at):
    old, new = some_heads(), some_heads(num_layers=2)
    write_heads(old, tmp_path)
    stop_writing_at(monkeypatch, "rename", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        write_heads(new, tmp_path)
    monkeypatch.undo()
    stop_writing_at(monkeypatch, crash_at, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        write_heads(old, tmp_path)
    monkeypatch.undo()
    assert equal(read_heads(tmp_path, FakeTarget()), new)
    write_heads(old, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["heads.json", "heads.safetensors"]
    assert equal(read_heads(tmp_path, FakeTarget()), old)


@pytest.mark.parametrize("fails_at", ["save", "describe", "rename"])
def test_a_full_disk_is_one_error_with_a_hint_and_spoils_nothing(tmp_path, monkeypatch, fails_at):
    old, new = some_heads(), some_heads(num_layers=2)
    write_heads(old, tmp_path)
    stop_writing_at(monkeypatch, fails_at, OSError(28, "No space left on device"))
    with pytest.raises(FormatError, match="No space left") as caught:
        write_heads(new, tmp_path)
    assert "free some space" in caught.value.hint
    monkeypatch.undo()
    assert equal(read_heads(tmp_path, FakeTarget()), new if fails_at == "rename" else old)


def stop_writing_at(monkeypatch, moment: str, error: BaseException) -> None:
    """Raise `error` in the middle of writing the numbers, at heads.json, or at the last rename."""
    replace, save = os.replace, native.save_file

    def broken_save(tensors, path, **rest):
        save(tensors, path, **rest)
        os.truncate(path, 40)
        raise error

    def broken_replace(source, destination):
        is_description = str(destination).endswith("heads.json")
        if is_description == (moment == "describe"):
            raise error
        replace(source, destination)

    if moment == "save":
        monkeypatch.setattr(native, "save_file", broken_save)
    else:
        monkeypatch.setattr(os, "replace", broken_replace)


def test_a_folder_that_was_moved_still_loads(tmp_path):
    write_heads(some_heads(), tmp_path / "here")
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert equal(read_heads(tmp_path / "there", FakeTarget()), some_heads())
