"""Rows that join and leave while others are written, and processes that write side by side."""

import multiprocessing
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from medusa_cli.config.recipe import Recipe, TargetSettings
from medusa_cli.errors import TrainingError
from medusa_cli.model.target import Target
from medusa_cli.pipeline.generation_workers import Job, Manner, write_beside, write_here
from tests.tiny_folders import save_tiny
from tests.tiny_models import VOCAB, greedy_of, prompt_of, target_of, tiny_model

ROWS = 6


@pytest.fixture(scope="module")
def target() -> Target:
    """A target whose texts end anywhere between their first token and their budget."""
    torch.set_num_threads(1)
    made = target_of(tiny_model("llama"))
    made.stop_ids = frozenset(range(0, VOCAB, 9))
    return made


class Steps:
    """Counts the forwards over drafts, and the rows in each."""

    def __init__(self, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        self.prefills: list[int] = []
        verify, read_piece = target.verify, target.read_piece

        def counted_verify(draft, cache, **named):
            self.rows.append(len(draft.tokens_BN))
            return verify(draft, cache, **named)

        def counted_piece(piece, *more):
            self.prefills.append(len(piece.ids))
            return read_piece(piece, *more)

        monkeypatch.setattr(target, "verify", counted_verify)
        monkeypatch.setattr(target, "read_piece", counted_piece)


def prompts_of(count: int) -> list[list[int]]:
    return [prompt_of(3 + n % 5, seed=n) for n in range(count)]


def jobs_of(count: int) -> list[Job]:
    return [Job(number, ids) for number, ids in enumerate(prompts_of(count))]


def test_rows_leave_when_their_text_ends_and_others_join_so_that_few_places_stay_empty(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(target, monkeypatch)
    texts = list(write_here(target, jobs_of(40), Manner(max_new_tokens=60, max_tokens=None, rows=ROWS)))
    lengths = [len(text.token_ids) for text in texts]
    assert min(lengths) < 5 < 30 < max(lengths), "the lengths differ, or nothing is shown"
    # a text's first token comes from reading its prompt
    work = sum(lengths) - len(texts)
    assert sum(steps.rows) == work
    assert len(steps.rows) < 1.5 * work / ROWS
    batches = [texts[n : n + ROWS] for n in range(0, 40, ROWS)]
    waiting_for_the_longest = sum(max(len(text.token_ids) for text in batch) for batch in batches)
    assert len(steps.rows) < 0.8 * waiting_for_the_longest


def test_prompts_are_taken_from_their_source_only_when_a_row_is_free(target: Target) -> None:
    taken = []

    def source() -> Iterable[Job]:
        for job in jobs_of(12):
            taken.append(job)
            yield job

    texts = write_here(target, source(), Manner(max_new_tokens=20, max_tokens=None, rows=3))
    next(texts)
    assert len(taken) < 12
    assert len(list(texts)) == 11


def test_many_rows_write_what_one_row_writes(target: Target) -> None:
    def texts(rows: int) -> dict[int, list[int]]:
        manner = Manner(max_new_tokens=16, max_tokens=None, rows=rows)
        return {text.index: text.token_ids for text in write_here(target, jobs_of(8), manner)}

    alone = texts(1)
    assert texts(5) == alone
    plain = greedy_of(tiny_model("llama"), prompts_of(8)[3], 16)
    end = next((n + 1 for n, token in enumerate(plain) if token in target.stop_ids), 16)
    assert alone[3] == plain[:end]


def test_hidden_states_are_the_ones_that_decided_each_token(target: Target) -> None:
    manner = Manner(max_new_tokens=12, max_tokens=None, rows=4, want_hidden=True)
    for text in write_here(target, jobs_of(6), manner):
        assert text.hidden_TH.shape == (len(text.token_ids), target.hidden_size)
        decided = (text.hidden_TH.float() @ target.output_weight.T).argmax(-1)
        assert decided.tolist() == text.token_ids


def test_prompt_and_text_together_stay_within_their_bound(target: Target) -> None:
    jobs = jobs_of(6)
    for text in write_here(target, jobs, Manner(max_new_tokens=60, max_tokens=12, rows=4)):
        assert len(jobs[text.index].ids) + len(text.token_ids) <= 12


# --- processes ---


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    folder = save_tiny(tmp_path_factory.mktemp("crew"))
    return Recipe(target=TargetSettings(model=str(folder), dtype="float32", runner="eager"))


MANNER = Manner(max_new_tokens=10, max_tokens=None, rows=2, want_hidden=True)


def test_two_processes_write_every_text_once_and_leave_when_all_is_written(recipe: Recipe) -> None:
    from medusa_cli.model.loading.load import load_target

    jobs = jobs_of(9)
    alone = {text.index: text for text in write_here(load_target(recipe.target), jobs, MANNER)}
    together = list(write_beside(recipe, jobs, MANNER, workers=2))
    assert sorted(text.index for text in together) == list(range(9))
    for text in together:
        assert text.token_ids == alone[text.index].token_ids
        assert torch.equal(text.hidden_TH, alone[text.index].hidden_TH)
    assert multiprocessing.active_children() == []


def test_what_is_sampled_depends_on_a_prompt_s_number_and_not_on_who_writes_it_or_when(recipe: Recipe) -> None:
    from medusa_cli.model.loading.load import load_target

    manner, jobs = replace(MANNER, temperature=2.0, seed=5), jobs_of(9)
    here = load_target(recipe.target)
    first = {jobs[text.index].number: text.token_ids for text in write_here(here, jobs, manner)}
    assert len({tuple(ids) for ids in first.values()}) == 9
    rest = jobs[6:] + jobs[:4]
    for texts in (write_here(here, rest, manner), write_beside(recipe, rest, manner, workers=2)):
        assert all(text.token_ids == first[rest[text.index].number] for text in texts)


def test_whoever_stops_listening_ends_the_processes(recipe: Recipe) -> None:
    texts = write_beside(recipe, jobs_of(40), MANNER, workers=2)
    next(texts)
    assert len(multiprocessing.active_children()) == 2
    texts.close()
    assert multiprocessing.active_children() == []


def test_a_process_that_dies_is_an_error_and_ends_the_others(recipe: Recipe) -> None:
    texts = write_beside(recipe, jobs_of(400), MANNER, workers=2)
    next(texts)
    multiprocessing.active_children()[0].kill()
    with pytest.raises(TrainingError, match="ended with code -9") as failed:
        list(texts)
    assert "what was written is kept" in failed.value.hint
    assert multiprocessing.active_children() == []


def test_what_a_process_can_not_do_is_told_in_its_own_words(recipe: Recipe, tmp_path: Path) -> None:
    missing = recipe.model_copy(update={"target": TargetSettings(model=str(tmp_path / "gone"))})
    with pytest.raises(TrainingError, match="no such model folder or file"):
        list(write_beside(missing, jobs_of(4), MANNER, workers=2))
    empty: Sequence[Job] = [Job(0, [1]), Job(1, [])]
    with pytest.raises(TrainingError, match="the prompt is empty"):
        list(write_beside(recipe, empty, MANNER, workers=2))
