"""A run that would not fit on the disk, or under its cap, is refused with the numbers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from medusa_cli.config.loading import load_recipe
from medusa_cli.config.recipe import Recipe
from medusa_cli.errors import RecipeError, TrainingError
from medusa_cli.pipeline.data_context import Stage
from medusa_cli.pipeline.planning import disk
from medusa_cli.pipeline.run_folder import open_folder
from medusa_cli.train.checkpoint import recipe_hash
from medusa_cli.train.store import HiddenStore, Sample

HIDDEN, TOKEN = 100, 2 * 100 + 4 + 1


@pytest.fixture
def stage_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A data stage with a cap, on a disk with so many bytes free."""

    def make(*, cap: float | None, free: int, **data: Any) -> Stage:
        monkeypatch.setattr(disk, "free_on_disk", lambda folder: free)
        recipe = Recipe.model_validate({"data": {"max_answer_tokens": 9, "max_disk_gb": cap, **data}})
        target: Any = SimpleNamespace(hidden_size=HIDDEN, context_limit=None)
        return Stage(recipe, target, tmp_path / "written", lambda *_: None)

    return make


def store_of(stage: Stage, samples: int) -> None:
    """So many answers that are there, of five tokens each."""
    with HiddenStore(stage.folder / "answers", hidden_size=HIDDEN, fingerprint="f", longest=10) as store:
        for number in range(samples):
            store.append(Sample(str(number), [1] * 5, torch.zeros(5, HIDDEN), [True] * 5))


def test_answers_that_may_grow_past_the_cap_are_refused_and_those_that_can_not_are_written(stage_of: Any) -> None:
    # 100 answers of at most nine tokens and the one before
    disk.check_answers(stage_of(cap=100 * 10 * TOKEN / 1e9, free=10**12), 100)
    with pytest.raises(TrainingError, match=r"may take 0.000205 GB; data.max_disk_gb allows 0.000203") as refusal:
        disk.check_answers(stage_of(cap=99 * 10 * TOKEN / 1e9, free=10**12), 100)
    assert "--num-samples" in refusal.value.hint


def test_answers_that_may_not_fit_on_the_disk_are_refused_without_a_cap_too(stage_of: Any) -> None:
    disk.check_answers(stage_of(cap=None, free=100 * 10 * TOKEN), 100)
    with pytest.raises(TrainingError, match="0.000205 GB more, and 0.000205 GB are free"):
        disk.check_answers(stage_of(cap=None, free=100 * 10 * TOKEN - 1), 100)


def test_what_is_there_needs_no_room_on_the_disk_but_counts_towards_the_cap(stage_of: Any) -> None:
    stage = stage_of(cap=None, free=10 * TOKEN)
    store_of(stage, 4)
    disk.check_answers(stage, 5)
    with pytest.raises(TrainingError, match="are free"):
        disk.check_answers(stage, 6)
    # four answers of five tokens, and one of ten that is missing
    disk.check_answers(stage_of(cap=30 * TOKEN / 1e9, free=10**12), 5)
    with pytest.raises(TrainingError, match="allows"):
        disk.check_answers(stage_of(cap=29 * TOKEN / 1e9, free=10**12), 5)
    # nothing is missing: a cap that is lower now, or a full disk, keeps nobody from going on
    disk.check_answers(stage_of(cap=TOKEN / 1e9, free=0), 4)


def test_a_server_s_answers_are_read_with_their_prompts(stage_of: Any) -> None:
    server = {"answers_from": "http://localhost:9/v1", "max_seq_length": 30}
    disk.check_answers(stage_of(cap=2 * 30 * TOKEN / 1e9, free=10**12, **server), 2)
    with pytest.raises(TrainingError, match="allows"):
        disk.check_answers(stage_of(cap=(2 * 30 * TOKEN - 1) / 1e9, free=10**12, **server), 2)


def test_checkpoints_that_would_not_fit_are_refused_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = torch.nn.Linear(10, 10, bias=False)
    needed = 4 * 100 * disk.COPIES_AT_ONCE
    monkeypatch.setattr(disk, "free_on_disk", lambda folder: needed - 1)
    with pytest.raises(TrainingError, match="checkpoints and heads take 4e-06 GB"):
        disk.check_training(heads, tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-00000001.pt").write_bytes(b"1")
    disk.check_training(heads, tmp_path)


def test_the_disk_below_a_folder_that_is_not_there_yet_is_its_parent_s(tmp_path: Path) -> None:
    assert disk.free_on_disk(tmp_path / "a" / "b") > 0


def test_another_cap_is_the_same_run(tmp_path: Path) -> None:
    bare, capped = (
        Recipe.model_validate({"output_dir": str(tmp_path), "data": {"max_disk_gb": cap}}) for cap in (None, 2.5)
    )
    assert recipe_hash(bare) == recipe_hash(capped)
    open_folder(bare, resume=False).claim("f")
    open_folder(capped, resume=False).claim("f")


@pytest.mark.parametrize("value", ["0", "-1", "true", "much", ".inf"])
def test_a_cap_that_is_no_amount_is_refused(value: str) -> None:
    with pytest.raises(RecipeError, match="data.max_disk_gb"):
        load_recipe(None, [f"data.max_disk_gb={value}"], surroundings={})
