"""`medusa train-heads` on a tiny model: every kind of data, the folder it leaves, and what may change between runs."""

import json
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from medusa_cli import assemble
from medusa_cli.decode import memory
from medusa_cli.model.target import Target
from tests.cli.harness import ANSWERS, LAYOUTS, Done, Medusa, Trained, rows_of, train_args


def keys(folder: Path, store: str) -> list[str]:
    return [json.loads(line)["key"] for line in (folder / "written" / store / "samples.jsonl").open()]


def test_the_folder_holds_all_that_heads_need(trained: Trained) -> None:
    assert trained.done.code == 0, trained.done.err
    drawn = {"training.png"} if find_spec("matplotlib") else set()
    assert {file.name for file in trained.folder.iterdir()} == drawn | {
        ".lock", "run.json", "written", "checkpoints", "heads.safetensors", "heads.json", "tree.json", "accuracy.json",
        "train.jsonl", "provenance.json", "README.md",
    }  # fmt: skip


def test_stdout_is_one_document_and_stderr_tells_the_stages(trained: Trained) -> None:
    document = trained.done.document
    assert list(document) == [
        "model", "output_dir", "num_heads", "accuracy", "positions", "coverage", "tree_size", "dynamic_tree",
        "expected_tokens", "predicted_speedup", "data", "answers", "seed",
    ]  # fmt: skip
    assert document["data"]["samples"] == 12
    assert document["tree_size"] == 6
    assert document["expected_tokens"] > 1
    stages = [line.partition(":")[0] for line in trained.done.err.splitlines()]
    told = [stage for stage in stages if stage in ("prompts", "answers", "training")]
    assert [stage for stage, _ in groupby(told)] == ["prompts", "answers", "training"]


def test_what_steered_the_prompts_is_recorded_with_the_command_and_the_versions(trained: Trained) -> None:
    provenance = json.loads((trained.folder / "provenance.json").read_text())
    assert "Explain the concept of " in provenance["recipe"]["data"]["openings"]
    assert provenance["recipe"]["data"]["num_samples"] == 12
    assert provenance["recipe"]["heads"]["num_heads"] == 3
    assert {"torch", "transformers", "medusa-heads"} <= set(provenance["versions"])
    assert "output_dir" not in provenance["recipe"]
    # one sample holds the last prompt token and the answer
    samples = map(json.loads, (trained.folder / "written/answers/samples.jsonl").open())
    assert provenance["data"]["tokens learnt"] == sum(sample["length"] - 1 for sample in samples)


def test_heads_keep_what_the_tree_promises_on_the_text_they_were_measured_on(trained: Trained) -> None:
    accuracy = json.loads((trained.folder / "accuracy.json").read_text())
    tree = json.loads((trained.folder / "tree.json").read_text())
    assert tree["step_cost"] == accuracy["step_cost"]
    assert len(tree["paths"]) == 6
    joint = {tuple(path): count / accuracy["path_positions"] for path, count in accuracy["paths"]}
    assert tree["expected_tokens"] == pytest.approx(1 + sum(joint[tuple(path)] for path in tree["paths"]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_data_trains(train: Callable[..., Done], tmp_path: Path, layout: str) -> None:
    file = tmp_path / f"{layout}.jsonl"
    file.write_text(rows_of(12, LAYOUTS[layout]))
    done = train("--dataset", file, "--json")
    assert done.code == 0, done.err
    assert done.document["data"]["samples"] == 12
    assert done.document["data"]["tokens written"] > 0
    store = "answers" if layout == "prompts" else "read"
    assert len(keys(tmp_path / "run", store)) == 12


def test_given_answers_are_learnt_and_the_target_s_own_are_measured(
    train: Callable[..., Done], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from medusa_cli.pipeline import run as module

    seen = []
    prepare = module._examples
    monkeypatch.setattr(
        module,
        "_examples",
        lambda recipe, target, material, heads: seen.append(material) or prepare(recipe, target, material, heads),
    )
    assert train("--dataset", data).code == 0
    (material,) = seen
    assert len(material.learnt) == 9
    assert material.judge.num_samples == 3
    assert material.judge is not material.corpus
    # an answer of the target starts where the given one does: at the last token of the prompt
    held_out = {material.corpus.keys[index] for index in range(12)} - {material.corpus.keys[i] for i in material.learnt}
    assert set(material.judge.keys) == held_out


def test_a_run_that_goes_on_writes_no_answer_again_and_measures_on_those_held_out_alone(
    train: Callable[..., Done], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from medusa_cli.pipeline import self_generated as module

    assert train("--dataset", data, "--num-samples", 8).code == 0
    first = keys(tmp_path / "run", "held-out")
    assert len(first) == 2
    asked: list[str] = []
    real = module.write_answers
    monkeypatch.setattr(module, "write_answers", lambda stage, prompts: asked.extend(prompts) or real(stage, prompts))
    positions = train("--dataset", data, "--num-samples", 8, "--resume-from-checkpoint", "--json")
    assert positions.code == 0, positions.err
    assert asked == []
    for file in (tmp_path / "run/checkpoints").iterdir():
        file.unlink()
    more = train("--dataset", data, "--json")
    assert more.code == 0, more.err
    assert asked
    assert set(asked).isdisjoint(first)
    held = keys(tmp_path / "run", "held-out")
    assert held == [*first, *asked]
    fresh = train("--dataset", data, "--json", folder="fresh")
    assert more.document["positions"] == fresh.document["positions"]


def test_prompts_that_are_too_long_are_left_out_and_counted(medusa: Medusa, tmp_path: Path, tiny: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(rows_of(8, LAYOUTS["prompts"]) + json.dumps({"prompt": "long " * 100}) + "\n")
    done = medusa(*train_args(tiny, tmp_path / "run", "--max-steps", 5, "--dataset", file))
    assert done.code == 0, done.err
    assert "note: 1 of 9 prompts are left out: empty, or longer than 80 tokens" in done.err
    assert "row 9" not in keys(tmp_path / "run", "answers")


def test_the_same_seed_makes_the_same_heads_to_the_bit(train: Callable[..., Done], tmp_path: Path) -> None:
    for folder in ("one", "two"):
        assert train(folder=folder).code == 0
    one, two = ((tmp_path / folder / "heads.safetensors").read_bytes() for folder in ("one", "two"))
    assert one == two


def test_training_leaves_every_number_of_the_model_as_it_was(
    train: Callable[..., Done], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from medusa_cli import assemble

    before: list[tuple[torch.nn.Module, dict[str, torch.Tensor]]] = []
    load_target = assemble.load_target

    def remembered(*args: Any) -> Target:
        target = load_target(*args)
        before.append((target.model, {name: held.clone() for name, held in target.model.state_dict().items()}))
        return target

    monkeypatch.setattr(assemble, "load_target", remembered)
    assert train("--dataset", data, "--runner", "eager").code == 0
    ((model, numbers),) = before
    after = model.state_dict()
    assert numbers.keys() == after.keys()
    assert all(torch.equal(held, after[name]) for name, held in numbers.items())


def test_a_finished_run_that_goes_on_has_nothing_to_do(train: Callable[..., Done], tmp_path: Path) -> None:
    assert train().code == 0
    before = (tmp_path / "run" / "heads.safetensors").read_bytes()
    log = (tmp_path / "run" / "train.jsonl").read_text()
    again = train()
    assert again.code == 1
    assert "holds a run that was started before\n hint: go on with --resume-from-checkpoint" in again.err
    assert train("--resume-from-checkpoint").code == 0
    assert (tmp_path / "run" / "heads.safetensors").read_bytes() == before
    assert (tmp_path / "run" / "train.jsonl").read_text() == log


def test_more_samples_are_written_to_those_that_are_there(train: Callable[..., Done], tmp_path: Path) -> None:
    assert train().code == 0
    run = tmp_path / "run"
    prompts, answers = (run / "written/prompts.jsonl").read_bytes(), (run / "written/answers/ids.i32").read_bytes()
    refused = train("--num-samples", 16, "--resume-from-checkpoint")
    assert refused.code == 1
    assert "was trained with other settings: data.num_samples\n hint: go back to them, or delete " in refused.err
    for file in (run / "checkpoints").iterdir():
        file.unlink()
    assert train("--num-samples", 16).code == 0
    assert (run / "written/prompts.jsonl").read_bytes().startswith(prompts)
    assert (run / "written/answers/ids.i32").read_bytes().startswith(answers)
    assert len(keys(run, "answers")) == 16


def test_two_runs_never_write_to_one_folder(train: Callable[..., Done], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run" / ".lock"):
        refused = train()
    assert refused.code == 1
    assert "another run is writing to " in refused.err
    assert train().code == 0


def test_a_data_set_whose_content_changed_is_noticed(train: Callable[..., Done], data: Path) -> None:
    assert train("--dataset", data).code == 0
    data.write_text(data.read_text().replace("blue", "grey"))
    changed = train("--dataset", data, "--resume-from-checkpoint")
    assert changed.code == 1
    assert f"started with another content of the data set than {data} holds" in changed.err


def test_a_data_set_that_only_moved_is_the_same(train: Callable[..., Done], data: Path, tmp_path: Path) -> None:
    assert train("--dataset", data).code == 0
    for file in (tmp_path / "run/checkpoints").iterdir():
        file.unlink()
    assert train("--dataset", data.rename(tmp_path / "elsewhere.jsonl")).code == 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (("--seed", 4), "is a run with other settings: seed"),
        (("--max-seq-length", 90, "data.prompt_top_p=0.5"), "other settings: data.max_seq_length, data.prompt_top_p"),
        (("--learning-rate", 1, "--num-heads", 2), "trained with other settings: heads.num_heads, train.learning_rate"),
    ],
)
def test_a_folder_of_other_settings_is_refused_before_the_model_is_loaded(
    train: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, changes: Sequence[object], named: str
) -> None:
    assert train().code == 0
    import medusa_cli.assemble

    monkeypatch.setattr(medusa_cli.assemble, "load_target", None)
    done = train(*changes, "--resume-from-checkpoint")
    assert done.code == 1
    assert named in done.err
    assert done.err.count("\n hint: ") == 1


def test_a_preview_shows_what_is_learnt_and_trains_nothing(
    medusa: Medusa, tiny: Path, data: Path, tmp_path: Path
) -> None:
    args = ("train-heads", "-m", tiny, "--dataset", data, "--preview-masks", "-o", tmp_path / "run")
    shown = medusa(*args)
    assert shown.code == 0
    assert f"\u27e60: {ANSWERS[0]}<|im_end|>\u27e7" in shown.out
    assert not (tmp_path / "run").exists()
    document = medusa(*args, "--json").document
    learnt = [part["text"] for part in document["segments"] if part["supervised"]]
    assert learnt == [f"0: {ANSWERS[0]}<|im_end|>"]
    assert "needs a data set" in medusa("train-heads", "-m", tiny, "--preview-masks").err


def test_curves_go_to_weights_and_biases_without_a_network(
    train: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    done = train("--report-to", "wandb", "--json")
    assert done.code == 0, done.err
    (stored,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"train/top1_head_1" in stored.read_bytes()
    assert done.document["data"]["samples"] == 12


def test_a_tree_is_as_large_as_was_asked_for(train: Callable[..., Done]) -> None:
    done = train("--tree-size", 9, "tree.max_size=4", "--json")
    assert done.document["tree_size"] <= 9
    assert done.document["tree_size"] > 4


def test_a_cache_that_can_not_fit_is_refused_before_anything_is_written(
    train: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1000)
    refused = train("data.rows=40")
    assert refused.code == 1
    assert " texts of up to 128 tokens at once need " in refused.err
    assert " hint: write fewer at once: data.rows and data.workers" in refused.err
    assert not (tmp_path / "run" / "written" / "prompts.jsonl").exists()


def test_hydra_heads_are_trained_measured_and_decoded_with(train, medusa: Medusa, tiny: Path, tmp_path: Path) -> None:
    done = train("--heads-type", "hydra", "--json", folder="hydra")
    assert done.code == 0, done.err
    folder = tmp_path / "hydra"
    assert json.loads((folder / "heads.json").read_text())["config"]["type"] == "hydra"
    asked = ("generate", "What is it?", "-m", tiny, "--dtype", "float32", "-n", 30, "--json")
    plain = medusa(*asked, "--drafter", "none").document
    for drafter, tree in (("hydra", ("--tree", "2x1")), ("mixed", ())):
        ours = medusa(*asked, "--heads", folder, "--drafter", drafter, "--speculate", "on", *tree).document
        assert (ours["drafter"], ours["token_ids"]) == (drafter, plain["token_ids"])
    refused = medusa(*asked, "--heads", folder, "--drafter", "medusa")
    assert refused.code == 1
    assert "these are hydra heads" in refused.err


def test_a_run_goes_on_from_heads_of_another_kind(medusa: Medusa, tiny: Path, tmp_path: Path, heads: Path) -> None:
    def run(*more: object, folder: str) -> Done:
        return medusa(*train_args(tiny, tmp_path / folder, "--heads-type", "hydra", *more))

    done = run(f"heads.start_from={heads}", "--max-steps", 1, folder="on")
    assert done.code == 0, done.err
    assert f"going on from {heads}: weight, bias, root_weight; untrained: path_weight" in done.err
    fresh = run("--max-steps", 1, folder="fresh")
    assert fresh.code == 0, fresh.err

    def first_loss(folder: str) -> float:
        lines = [json.loads(line) for line in (tmp_path / folder / "train.jsonl").open()]
        return next(line["loss"] for line in lines if "loss" in line)

    assert first_loss("on") < first_loss("fresh")


def test_heads_to_go_on_from_that_are_not_there_are_told_before_a_model_is_loaded(
    train: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assemble, "load_target", None)
    refused = train("heads.start_from=nowhere/at/all")
    assert refused.code == 1
    assert "no heads at" in refused.err
