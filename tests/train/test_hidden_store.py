"""The folder of hidden states: what is complete stays, what is not is dropped."""

import json
import os

import numpy as np
import pytest
import torch

import medusa_cli.train.store as store_module
from medusa_cli.errors import TrainingError
from medusa_cli.train.corpus import Corpus
from medusa_cli.train.store import HiddenStore, Sample

HIDDEN = 16


def sample(key: str, length: int, missing: int = 0) -> Sample:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(50, (length,), generator=generator).tolist()
    hidden = torch.randn(length - missing, HIDDEN, generator=generator)
    return Sample(key, ids, hidden, [place > 1 for place in range(length)])


def open_store(folder, **changes) -> HiddenStore:
    return HiddenStore(folder, **{"hidden_size": HIDDEN, "fingerprint": "abc", "longest": 9, **changes})


def same(one: Corpus, other: Corpus) -> bool:
    return one.keys == other.keys and all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("hidden_TH", "ids_T", "supervised_T", "offsets_S")
    )


def test_a_stored_corpus_equals_the_one_in_memory(tmp_path):
    samples = [sample("a", 5), sample("b", 9, missing=2), sample("ç", 3)]
    with open_store(tmp_path) as store:
        for one in samples:
            store.append(one)
        store.sync()
    assert same(Corpus.open(tmp_path), Corpus.from_samples(samples))


def test_appending_goes_on_where_it_stopped(tmp_path):
    samples = [sample("a", 5), sample("b", 9), sample("ç", 3)]
    for one in samples:
        with open_store(tmp_path) as store:
            store.append(one)
    with open_store(tmp_path) as store:
        assert store.keys == ["a", "b", "ç"]
        assert store.num_positions == 17
    assert same(Corpus.open(tmp_path), Corpus.from_samples(samples))


@pytest.mark.parametrize("name", ["hidden.f16", "ids.i32", "supervised.u8", "samples.jsonl"])
def test_a_kill_in_the_middle_of_a_sample_loses_only_that_sample(tmp_path, monkeypatch, name):
    with open_store(tmp_path) as store:
        store.append(sample("a", 5))
        write, files = os.write, dict(zip(store._files, (*store_module.DATA, "samples.jsonl"), strict=True))

        def killed_write(file, data):
            if files[file] == name:
                write(file, bytes(data)[: len(data) // 2])
                raise KeyboardInterrupt
            return write(file, data)

        monkeypatch.setattr(os, "write", killed_write)
        with pytest.raises(KeyboardInterrupt):
            store.append(sample("b", 9))
        monkeypatch.undo()
    assert Corpus.open(tmp_path).keys == ["a"]
    with open_store(tmp_path) as store:
        assert store.keys == ["a"]
        store.append(sample("c", 4))
    assert same(Corpus.open(tmp_path), Corpus.from_samples([sample("a", 5), sample("c", 4)]))


def test_numbers_lost_with_the_power_take_their_samples_with_them(tmp_path):
    with open_store(tmp_path) as store:
        for one in (sample("a", 5), sample("b", 9), sample("c", 3)):
            store.append(one)
    os.truncate(tmp_path / "ids.i32", 4 * 13)
    assert same(Corpus.open(tmp_path), Corpus.from_samples([sample("a", 5)]))
    with open_store(tmp_path) as store:
        assert store.keys == ["a"]


def test_a_full_disk_is_an_error_with_a_hint_and_leaves_whole_samples(tmp_path, monkeypatch):
    with open_store(tmp_path) as store:
        store.append(sample("a", 5))
        write = os.write
        monkeypatch.setattr(os, "write", lambda file, data: write(file, data) if len(data) > 50 else no_space())
        with pytest.raises(TrainingError, match="No space left") as caught:
            store.append(sample("b", 9))
        assert "free some space" in caught.value.hint
        monkeypatch.undo()
        store.append(sample("c", 4))
    assert same(Corpus.open(tmp_path), Corpus.from_samples([sample("a", 5), sample("c", 4)]))


def filled(folder, count: int) -> list[Sample]:
    samples = [sample(f"{number}", 3 + number % 5) for number in range(count)]
    with open_store(folder) as store:
        for one in samples:
            store.append(one)
    return samples


@pytest.mark.parametrize("name", store_module.DATA)
def test_more_numbers_missing_than_a_stop_leaves_out_are_told_and_nothing_is_cut(tmp_path, name):
    filled(tmp_path, 60)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:40])
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(TrainingError, match=rf"{name} is damaged: it holds \d+ of 60 samples"):
        open_store(tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_numbers_that_the_machine_lost_when_it_stopped_are_written_again(tmp_path):
    samples = filled(tmp_path, 60)
    file = tmp_path / "hidden.f16"
    whole = sum(len(one.ids) for one in samples[:40])
    file.write_bytes(file.read_bytes()[: (whole + 1) * HIDDEN * 2])
    with open_store(tmp_path) as store:
        assert store.keys == [one.key for one in samples[:40]]
        for one in samples[40:]:
            store.append(one)
    assert same(Corpus.open(tmp_path), Corpus.from_samples(samples))


def test_a_list_of_samples_that_lost_most_of_its_lines_is_told_and_nothing_is_cut(tmp_path):
    filled(tmp_path, 120)
    (tmp_path / "samples.jsonl").write_text("")
    size = (tmp_path / "hidden.f16").stat().st_size
    with pytest.raises(TrainingError, match=r"samples.jsonl is damaged: it names 0 of 600 tokens"):
        open_store(tmp_path)
    assert (tmp_path / "hidden.f16").stat().st_size == size


@pytest.mark.parametrize("name", store_module.DATA)
def test_numbers_that_are_not_those_written_name_their_sample(tmp_path, name):
    filled(tmp_path, 4)
    content = bytearray((tmp_path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TrainingError, match=r"is damaged: sample '\d' is not as it was written"):
        Corpus.open(tmp_path)


def test_a_folder_from_before_there_were_checksums_is_read(tmp_path):
    samples = filled(tmp_path, 4)
    index = tmp_path / "samples.jsonl"
    lines = [json.loads(line) for line in index.open()]
    index.write_text("".join(json.dumps({"key": n["key"], "length": n["length"]}) + "\n" for n in lines))
    with open_store(tmp_path) as store:
        store.append(sample("new", 4))
    assert same(Corpus.open(tmp_path), Corpus.from_samples([*samples, sample("new", 4)]))


def no_space() -> int:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("change", [{"hidden_size": 8}, {"fingerprint": "xyz"}])
def test_a_folder_of_another_model_is_refused(tmp_path, change):
    open_store(tmp_path).close()
    with pytest.raises(TrainingError, match="another model"):
        open_store(tmp_path, **change)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e6])
def test_a_state_that_16_bits_can_t_hold_names_its_sample(tmp_path, bad):
    one = sample("broken", 5)
    one.hidden[2, 3] = bad
    with open_store(tmp_path) as store, pytest.raises(TrainingError, match="'broken'"):
        store.append(one)


def test_an_empty_folder_and_a_missing_one_are_errors(tmp_path):
    with pytest.raises(TrainingError, match="no hidden states in"):
        Corpus.open(tmp_path / "nowhere")
    open_store(tmp_path).close()
    with pytest.raises(TrainingError, match="no complete sample"):
        Corpus.open(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("store.json", "{"),
        ("store.json", "[]"),
        ("samples.jsonl", "nonsense\n"),
        ("samples.jsonl", "[]\n"),
        ("samples.jsonl", '{"key": 1}\n'),
    ],
)
def test_a_damaged_folder_says_what_to_do(tmp_path, name, text):
    open_store(tmp_path).close()
    (tmp_path / name).write_text(text)
    with pytest.raises(TrainingError) as caught:
        open_store(tmp_path)
    assert "delete the folder" in caught.value.hint
