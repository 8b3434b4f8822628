"""A format of head files, as another package brings it: this file and one entry point, no change elsewhere."""

import json
import os
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import pytest
import torch

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.assemble import DrafterChoice, load_drafter
from medusa_cli.decode.loop import Parts, collect
from medusa_cli.decode.rows import Limits
from medusa_cli.errors import FormatError, HeadsMismatch, PartError
from medusa_cli.heads.base import Heads
from medusa_cli.heads.config import HeadsConfig
from medusa_cli.heads.kinds import heads_class
from medusa_cli.registry import read_config, read_heads
from tests.drafters.test_dynamic_drafter import random_heads
from tests.examples.conftest import Install
from tests.tiny_models import NUM_NEW, known, target_of, tiny_model

FILE = "heads.npz"


class NpzFormat:
    """All tensors and the config, as JSON, in one archive of numpy's."""

    name = "npz"

    def detect(self, folder: Path) -> bool:
        return (folder / FILE).is_file()

    def read_config(self, folder: Path) -> HeadsConfig:
        return self._config(self._arrays(folder))

    def _config(self, arrays: dict[str, np.ndarray]) -> HeadsConfig:
        described = json.loads(str(arrays["config"]))
        return heads_class(described["type"]).describes.model_validate(described)

    def read(self, folder: Path) -> Heads:
        arrays = self._arrays(folder)
        config = self._config(arrays)
        del arrays["config"]
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        heads = heads_class(config.type)(config, tensors["draft_ids"])
        heads.load_state_dict(tensors)
        return heads

    def write(self, heads: Heads, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {name: value.numpy() for name, value in heads.state_dict().items()}
        with (folder / f"{FILE}.new").open("wb") as file:
            np.savez(file, config=np.array(heads.config.model_dump_json()), **arrays)
        os.replace(folder / f"{FILE}.new", folder / FILE)

    def _arrays(self, folder: Path) -> dict[str, np.ndarray]:
        try:
            with np.load(folder / FILE, allow_pickle=False) as file:
                return dict(file)
        except (OSError, ValueError, BadZipFile, EOFError) as error:
            raise FormatError(f"{folder / FILE} is damaged: {error}", "copy it again") from error


@pytest.fixture(autouse=True)
def installed(install: Install) -> None:
    install("medusa.formats", "npz", "tests.examples.test_npz_format:NpzFormat")


def written(folder: Path, fingerprint: str | None = None) -> Heads:
    target = target_of(tiny_model("llama"))
    heads = random_heads(target)
    heads.config = heads.config.model_copy(update={"target_fingerprint": fingerprint or target.fingerprint})
    NpzFormat().write(heads, folder)
    return heads


def test_heads_come_back_bit_equal(tmp_path: Path) -> None:
    heads = written(tmp_path)
    found = read_heads(tmp_path, target_of(tiny_model("llama")))
    assert read_config(tmp_path) == found.config == heads.config
    assert all(torch.equal(found.state_dict()[name], value) for name, value in heads.state_dict().items())


def test_they_draft_and_the_text_is_the_greedy_one(tmp_path: Path) -> None:
    written(tmp_path)
    target = target_of(tiny_model("llama"))
    drafter = load_drafter(DrafterChoice("medusa", str(tmp_path), "3x2", speculate="on"), target)
    found = collect(Parts(target, drafter, Greedy()), known("llama").prompts, Limits(NUM_NEW), max_rows=2)
    assert [each.token_ids for each in found] == known("llama").wanted(3)


@pytest.mark.parametrize("kept", [0, 10, 1000])
def test_a_file_cut_short_is_refused(kept: int, tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:kept])
    with pytest.raises(FormatError, match="is damaged"):
        read_heads(tmp_path, target_of(tiny_model("llama")))


def test_heads_of_another_model_are_refused_as_in_our_own_format(tmp_path: Path) -> None:
    written(tmp_path, fingerprint="another")
    with pytest.raises(HeadsMismatch):
        read_heads(tmp_path, target_of(tiny_model("llama")))


def test_a_folder_of_no_known_format_is_told_as_ours(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text(json.dumps({}))
    with pytest.raises(FormatError, match=r"heads\.json is missing"):
        read_heads(tmp_path, target_of(tiny_model("llama")))


class HalfFormat:
    """Knows its folders and reads none."""

    def detect(self, folder: Path) -> bool:
        return True


def test_a_format_that_lacks_methods_is_told_with_their_names_and_whose_it_is(tmp_path: Path, install: Install) -> None:
    install("medusa.formats", "half", "tests.examples.test_npz_format:HalfFormat")
    with pytest.raises(PartError, match="another-half brings .* is no HeadFormat: it lacks .*read.*write"):
        read_config(tmp_path)
