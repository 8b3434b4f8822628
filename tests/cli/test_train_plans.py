"""`medusa train-heads --plan`: what a run would write, need and take, told without starting it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.harness import LAYOUTS, Done, Medusa, Trained, rows_of, train_args


def test_a_plan_bounds_what_the_run_then_does_and_changes_nothing(
    medusa: Medusa, tiny: Path, trained: Trained, tmp_path: Path
) -> None:
    before = medusa(*train_args(tiny, tmp_path / "new", "--plan", "--json")).document
    assert not (tmp_path / "new").exists()
    assert (before["prompts_written"], before["samples_ready"], before["steps_saved"], before["bytes_there"]) == (
        0,
    ) * 4
    files = {file: file.read_bytes() for file in trained.folder.rglob("*") if file.is_file()}
    after = medusa(*train_args(tiny, trained.folder, "--plan", "--json")).document
    assert {file: file.read_bytes() for file in trained.folder.rglob("*") if file.is_file()} == files
    assert (after["prompts_written"], after["samples_ready"]) == (12, 12)
    assert 0 < after["steps_saved"] <= after["steps_at_most"] == before["steps_at_most"]
    assert trained.done.document["data"]["tokens learnt"] <= after["tokens_at_most"]
    # 3 heads of a block over the hidden state and the root: two matrices and a bias each
    assert after["parameters"] == 3 * (2 * 32 * 32 + 32)
    stored = sum(file.stat().st_size for file in (trained.folder / "written" / "answers").iterdir())
    assert stored < after["bytes_at_most"]
    shown = medusa(*train_args(tiny, trained.folder, "--plan")).out
    assert "samples with hidden states" in shown
    assert "6,240 parameters" in shown
    assert "num_samples: 12\n" in shown  # the recipe as it is resolved
    assert "time: about 0:0" in shown
    assert before["recipe"]["data"]["num_samples"] == 12
    seconds = before["seconds"]
    stages = ("prompts", "answers", "training", "decodes")
    assert min(seconds[stage] for stage in stages) > 0
    assert seconds["total"] == pytest.approx(sum(seconds[stage] for stage in stages))
    assert (after["seconds"]["prompts"], after["seconds"]["answers"]) == (0, 0)  # they are there
    # float32 weights of the tiny model, by hand: embeddings and output, two layers, norms
    layer = 32 * 32 * 2 + 16 * 32 * 2 + 3 * 32 * 48 + 2 * 32
    assert before["memory"]["weights"] == 4 * (2 * 304 * 32 + 2 * layer + 32)
    assert before["memory"]["needed"] > before["memory"]["weights"]


def test_a_plan_of_what_can_not_be_tried_here_says_why(medusa: Medusa, tiny: Path, tmp_path: Path) -> None:
    plan = medusa(*train_args(tiny, tmp_path / "new", "--plan", "--json", "--device", "cuda:9"))
    assert plan.code == 0, plan.err
    assert plan.document["seconds"] is None
    assert plan.document["why_not_timed"].startswith("device cuda:9 is not there")
    large = medusa(*train_args(tiny, tmp_path / "new", "--plan", "data.rows=900000000", "--num-samples", 900000000))
    assert "time: not tried: the run needs about " in large.out
    assert ": too little (data.rows, data.workers)" in large.out


def test_a_plan_says_what_the_states_take_and_a_cap_refuses_the_run_before_a_word_is_written(
    medusa: Medusa, tiny: Path, data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "new"
    free = medusa(*train_args(tiny, folder, "--plan", "--json")).document["disk"]
    # 12 answers of at most 40 tokens and the one before: 32 numbers of two bytes, an id and a flag each
    assert (free["states"], free["missing"], free["cap"], free["fault"]) == (12 * 41 * 69, 12 * 41 * 69, None, None)
    capped = medusa(*train_args(tiny, folder, "--plan", "data.max_disk_gb=0.00003"))
    assert capped.code == 0
    assert "data.max_disk_gb allows 0: too little (--num-samples, --max-seq-length)" in capped.out
    run = medusa(*train_args(tiny, folder, "data.max_disk_gb=0.00003"))
    assert run.code == 1
    assert "error: the hidden states may take 3.39e-05 GB; data.max_disk_gb allows 3e-05 GB" in run.err
    assert "hint: fewer samples (--num-samples)" in run.err
    assert not list(folder.glob("written/**/*.jsonl"))
    given = medusa(*train_args(tiny, tmp_path / "given", "--dataset", data, "data.max_disk_gb=0.00003"))
    assert (given.code, "data.max_disk_gb allows 3e-05 GB" in given.err) == (1, True)
    assert (tmp_path / "given" / "written" / "read" / "hidden.f16").stat().st_size == 0


def test_a_plan_of_given_text_counts_its_reading(medusa: Medusa, tiny: Path, data: Path, tmp_path: Path) -> None:
    plan = medusa(*train_args(tiny, tmp_path / "new", "--plan", "--json", "--dataset", data)).document
    assert plan["seconds"]["reading"] > 0
    assert plan["seconds"]["prompts"] == plan["seconds"]["answers"] == 0


def test_a_plan_of_answers_made_anew_counts_who_makes_them(
    medusa: Medusa, tiny: Path, data: Path, tmp_path: Path
) -> None:
    own = train_args(tiny, tmp_path / "new", "--plan", "--json", "--answers-from", "self", "--dataset", data)
    seconds = medusa(*own).document["seconds"]
    assert seconds["answers"] > 0
    assert seconds["prompts"] == seconds["reading"] == 0
    server = train_args(tiny, tmp_path / "new", "--plan", "--json", "--answers-from", "http://localhost:9/v1")
    seconds = medusa(*server).document["seconds"]
    assert seconds["prompts"] > 0
    assert seconds["reading"] > 0
    assert seconds["answers"] == 0


def test_a_plan_counts_decodes_that_are_wanted_and_all_of_them_where_they_decide(
    medusa: Medusa, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from medusa_cli.pipeline.planning import plan as module
    from medusa_cli.pipeline.planning.effort import Effort

    def decodes(*more: object) -> float:
        args = train_args(tiny, tmp_path / "new", "--plan", "--json", "--max-steps", 50, *more)
        return medusa(*args).document["seconds"]["decodes"]

    monkeypatch.setattr(module, "measure_effort", lambda *_: Effort(0.0, 0.0, 1.0, decode=4.0))
    assert decodes("--decode-steps", 0) == 0
    assert decodes("--decode-steps", 20) == pytest.approx(3 * 4.0)
    assert decodes("--decode-steps", 1) == pytest.approx(9 * 4.0), "eight and the last"
    assert decodes("--decode-steps", 1, "--patience", 3) == pytest.approx(50 * 4.0)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("nosuch.jsonl", None, "error: no such file: "),
        ("empty.jsonl", "", "0 usable rows"),
        ("data.csv", "a,b\n", "can't tell its format from '.csv'"),
    ],
)
def test_a_plan_of_data_that_can_not_be_used_ends_as_the_run_would(
    name: str, content: str | None, words: str, medusa: Medusa, tiny: Path, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    done = medusa(*train_args(tiny, tmp_path / "run", "--plan", "--dataset", tmp_path / name))
    assert done.code == 1
    assert words in done.err
    assert done.out == ""


def test_a_plan_counts_the_rows_of_a_file_and_answers_before_it_shows_the_recipe(
    medusa: Medusa, tiny: Path, tmp_path: Path
) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(rows_of(16, LAYOUTS["messages"]) + "{\n")
    args = train_args(tiny, tmp_path / "new", "--plan", "--dataset", file, "--num-samples", 4000, "--device", "cuda:9")
    plan = medusa(*args, "--json").document
    assert plan["samples"] == 16
    assert plan["tokens_at_most"] == 16 * 120
    assert plan["recipe"]["data"]["num_samples"] == 4000
    asked = medusa(*args, "--json", "--answers-from", "self").document
    assert (asked["samples"], asked["tokens_at_most"]) == (16, 16 * 40)
    shown = medusa(*args).out
    assert shown.index("training steps") < shown.index("time: ") < shown.index("num_samples: 4000")


def test_a_plan_and_a_preview_are_not_shown_at_once(train: Callable[..., Done]) -> None:
    assert train("--plan", "--preview-masks").code == 2
