"""What a training run of the program shows of itself: decodes, early stopping, the picture, Weights & Biases."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from medusa_cli import assemble
from tests.cli.harness import Done, Medusa, Trained, train_args


def rows_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "train.jsonl").open()]
    return [row for row in rows if row["kind"] == kind]


def test_a_run_decodes_at_its_end_at_least_and_says_what_that_gained(trained: Trained) -> None:
    rows = rows_of(trained.folder, "decode")
    assert rows
    assert rows[-1]["step"] == rows_of(trained.folder, "train")[-1]["step"]
    assert 1 <= rows[-1]["tokens_per_step"] <= 4
    assert rows[-1]["speedup"] > 0
    assert f"held-out prompts decode at {rows[-1]['tokens_per_step']:.2f} tokens a step (chain" in trained.done.err
    evaluated = rows_of(trained.folder, "eval")[-1]
    given = " ".join(f"{share:.2f}" for share in evaluated["conditional_K"])
    assert f"where all heads before are right: {given}" in trained.done.err


def test_a_run_with_patience_stops_and_stores_the_heads_that_decoded_best(
    train: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from medusa_cli.pipeline.decode_eval import Probe
    from medusa_cli.train.early_stopping import Decoded

    asked = ("--decode-steps", 1, "--patience", 2, "--save-steps", 1)
    made: list[float] = []

    def falling(probe: Probe, heads: object) -> Decoded:
        made.append(1.8 - len(made) / 10)
        return Decoded(made[-1], 1.0)

    monkeypatch.setattr(Probe, "__call__", falling)
    done = train(*asked)
    assert done.code == 0, done.err
    decodes = rows_of(tmp_path / "run", "decode")
    assert [(row["step"], row["best_step"], row["waited"]) for row in decodes] == [(1, 1, 0), (2, 1, 1), (3, 1, 2)]
    card = (tmp_path / "run" / "README.md").read_text()
    assert "Stopped after step 3 of 5; the heads are those of step 1, which decoded best." in card
    before = (tmp_path / "run" / "heads.safetensors").read_bytes()
    refused = train("--decode-steps", 1, "--resume-from-checkpoint")
    assert "was trained with other settings: train.decode_steps, train.patience" in refused.err
    assert train(*asked, "--resume-from-checkpoint").code == 0
    assert len(made) == 3, "nothing is decoded again"
    assert (tmp_path / "run" / "heads.safetensors").read_bytes() == before


def test_decodes_change_nothing_that_is_learnt(train: Callable[..., Done], tmp_path: Path) -> None:
    assert train("--decode-steps", 2, folder="shown").code == 0
    assert train("--decode-steps", 0, folder="plain").code == 0
    assert rows_of(tmp_path / "shown", "decode")
    assert not rows_of(tmp_path / "plain", "decode")
    one, other = ((tmp_path / name / "heads.safetensors").read_bytes() for name in ("shown", "plain"))
    assert one == other


def test_given_text_is_decoded_after_its_own_prompts(train: Callable[..., Done], data: Path, tmp_path: Path) -> None:
    done = train("--dataset", data)
    assert done.code == 0, done.err
    assert rows_of(tmp_path / "run", "decode")


def test_the_card_shows_the_picture_of_the_run(trained: Trained) -> None:
    pytest.importorskip("matplotlib")
    assert (trained.folder / "training.png").read_bytes().startswith(b"\x89PNG")
    assert "](training.png)" in (trained.folder / "README.md").read_text()


def test_without_what_draws_the_card_has_the_numbers(
    train: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert train().code == 0
    card = (tmp_path / "run" / "README.md").read_text()
    assert not (tmp_path / "run" / "training.png").exists()
    assert "training.png" not in card
    assert "| step | held-out loss | head 1 | head 2 | head 3 | tokens a step | speed-up |" in card


def test_a_missing_key_is_told_before_a_model_is_loaded_or_a_prompt_is_written(
    train: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setattr(assemble, "load_target", None)
    refused = train("--report-to", "wandb")
    assert refused.code == 1
    assert "Weights & Biases can't start: No API key configured" in refused.err
    assert " hint: log in with `wandb login`, set WANDB_MODE=offline, or leave out --report-to" in refused.err
    assert not (tmp_path / "run" / "written").exists()


def test_patience_without_decodes_is_refused(train: Callable[..., Done]) -> None:
    refused = train("--patience", 2, "--decode-steps", 0)
    assert refused.code == 1
    assert "has patience with decodes, and decode_steps 0, which makes none: leave one out" in refused.err


def test_a_run_says_beforehand_how_long_it_takes_and_learns_what_it_would_have_learnt(
    train: Callable[..., Done], medusa: Medusa, tiny: Path, tmp_path: Path
) -> None:
    assert train(folder="quiet").code == 0
    told = medusa(*train_args(tiny, tmp_path / "told", "--max-steps", 5))
    said = told.err.splitlines()
    (time,) = [place for place, line in enumerate(said) if line.startswith("time: about ")]
    assert time < said.index("prompts")
    assert said.index("prompts") < said.index("measuring accuracies") < said.index("measuring steps")
    one, other = ((tmp_path / name / "heads.safetensors").read_bytes() for name in ("quiet", "told"))
    assert one == other
