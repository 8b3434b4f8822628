"""`medusa train-heads --heads-type block` on a tiny model: the whole path, what is kept of it, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cli.harness import LAYOUTS, Done, Medusa, rows_of, run_here, train_args
from tests.run_folders import log_of

BLOCK = ("--heads-type", "block", "train.place_share=0.5", "--learning-rate", 3e-3)


def test_they_are_trained_measured_and_decoded_with(train, medusa: Medusa, tiny: Path, tmp_path: Path) -> None:
    done = train(*BLOCK, "--json", folder="block")
    assert done.code == 0, done.err
    folder = tmp_path / "block"
    config = json.loads((folder / "heads.json").read_text())["config"]
    assert (config["type"], config["num_heads"], config["num_layers"], config["taps"]) == ("block", 3, 2, [1])
    assert done.document["num_heads"] == 3
    steps = [line for line in log_of(folder) if line["kind"] == "train"]
    assert steps[-1]["loss"] < steps[0]["loss"]
    recipe = json.loads((folder / "provenance.json").read_text())["recipe"]
    assert recipe["train"]["losses"] == {"ce": 0.1, "l1": 0.9, "kl": 0.0}
    asked = ("generate", "What is it?", "-m", tiny, "--dtype", "float32", "-n", 30, "--json", "--speculate", "on")
    plain = medusa(*asked[:-2], "--drafter", "none").document
    for drafter, tree in (("block", ("--tree", "2x1")), ("block", ("--tree", "dynamic:6")), ("mixed", ())):
        ours = medusa(*asked, "--heads", folder, "--drafter", drafter, *tree).document
        assert (ours["drafter"], ours["token_ids"]) == (drafter, plain["token_ids"])
    refused = medusa(*asked, "--heads", folder, "--drafter", "medusa")
    assert refused.code == 1
    assert "these are block heads" in refused.err


def test_whole_texts_are_stored_with_their_inner_states(train: Callable[..., Done], tmp_path: Path) -> None:
    done = train(*BLOCK, "--max-steps", 2)
    assert done.code == 0, done.err
    store = tmp_path / "run" / "written" / "answers"
    lengths = [json.loads(line)["length"] for line in (store / "samples.jsonl").open()]
    taps = np.fromfile(store / "taps.f16", np.float16).reshape(sum(lengths), -1)
    assert taps.shape[1] == 32
    scale = np.sqrt((taps.astype(np.float32) ** 2).mean(1))
    ends = np.cumsum(lengths) - 1  # the last token is never read
    assert np.allclose(np.delete(scale, ends), 1, atol=0.01)
    assert not scale[ends].any()
    supervised = np.fromfile(store / "supervised.u8", np.uint8)
    assert 0 < supervised.sum() < len(supervised)
    assert not supervised[0]


def test_the_target_can_be_run_again_instead(train: Callable[..., Done], tmp_path: Path) -> None:
    same = ("data.workers=1", "--max-steps", 4, *BLOCK)
    again = train(*same, "train.states=rerun", folder="again")
    assert again.code == 0, again.err
    assert not (tmp_path / "again" / "written" / "answers" / "taps.f16").exists()
    assert train(*same, folder="stored").code == 0
    one, other = ([line["loss"] for line in log_of(tmp_path / name) if "loss" in line] for name in ("again", "stored"))
    assert len(one) > 4
    assert one == pytest.approx(other, rel=0.01)


def test_a_run_goes_on_where_it_stopped_and_is_not_mixed_with_another_kind_s(
    train: Callable[..., Done], tmp_path: Path
) -> None:
    whole = train(*BLOCK, "--max-steps", 8, "--save-steps", 4, folder="whole")
    assert whole.code == 0, whole.err
    assert train(*BLOCK, "--max-steps", 8, "--save-steps", 4).code == 0
    folder = tmp_path / "run"
    (folder / "checkpoints" / "step-00000008.pt").unlink()
    again = train(*BLOCK, "--max-steps", 8, "--save-steps", 4, "--resume-from-checkpoint")
    assert again.code == 0, again.err
    steps = [line["step"] for line in log_of(folder) if line["kind"] == "train"]
    assert steps == list(range(1, 9))
    weights = [(tmp_path / name / "heads.safetensors").read_bytes() for name in ("whole", "run")]
    assert weights[0] == weights[1]
    for file in (folder / "checkpoints").iterdir():
        file.unlink()
    (folder / "checkpoints").rmdir()
    other = train("--max-steps", 1)
    assert other.code == 1
    assert "holds hidden states for other heads" in other.err


@pytest.mark.parametrize("layout", ["prompts", "sharegpt"])
def test_text_of_others_is_learnt_with_the_states_it_has(
    train: Callable[..., Done], tmp_path: Path, layout: str
) -> None:
    file = tmp_path / f"{layout}.jsonl"
    file.write_text(rows_of(12, LAYOUTS[layout]))
    done = train(*BLOCK, "--max-steps", 3, "--dataset", file)
    assert done.code == 0, done.err
    stores = ("answers",) if layout == "prompts" else ("read", "held-out")
    assert all((tmp_path / "run" / "written" / store / "taps.f16").stat().st_size for store in stores)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--heads-type", "medusa", "train.states=rerun"), "medusa heads don't see"),
        (("--heads-type", "block", "lora.rank=4"), "block heads can't learn beside an adapter"),
        (("--heads-type", "block", "heads.options={taps: 9}"), "heads.options.taps: there is no 9"),
        (("--heads-type", "block", "heads.options={tops: 9}"), "no setting heads.options.tops"),
        (("--heads-type", "block", "train.losses={ce: 0, l1: 0}"), "nothing to learn"),
        (("--heads-type", "block", "train.place_share=0"), "train.place_share must be more than 0"),
    ],
)
def test_what_can_t_be_is_told_in_two_lines(
    train: Callable[..., Done], tmp_path: Path, more: tuple[str, ...], told: str
) -> None:
    done = train(*more)
    assert done.code == 1
    assert told in done.err
    assert " hint: " in done.err


def test_the_plan_counts_states_and_memory(tiny: Path, tmp_path: Path) -> None:
    def planned(*more: object) -> dict[str, Any]:
        done = run_here(*train_args(tiny, tmp_path / "run", "--heads-type", "block", "--plan", "--json", *more))
        assert done.code == 0, done.err
        document: dict[str, Any] = json.loads(done.out)
        return document

    stored, again = planned(), planned("train.states=rerun")
    assert stored["disk"]["states"] > 1.5 * again["disk"]["states"]
    assert stored["memory"]["training"] < again["memory"]["training"], "what reading takes is needed then as well"
    assert not (tmp_path / "run" / "written").exists()


def test_the_heads_it_makes_hold_the_numbers_it_plans(train: Callable[..., Done], tmp_path: Path) -> None:
    from medusa_cli.formats.native import NativeFormat

    assert train(*BLOCK, "--max-steps", 1).code == 0
    heads = NativeFormat().read(tmp_path / "run")
    assert all(parameter.dtype == torch.float16 for parameter in heads.parameters())
