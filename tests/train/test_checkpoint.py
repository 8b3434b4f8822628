"""A run that stops goes on as if it hadn't."""

import json
import os

import pytest
import torch

from medusa_cli.config.recipe import Recipe, TrainSettings
from medusa_cli.errors import TrainingError
from medusa_cli.train.checkpoint import TrainLog, recipe_hash
from medusa_cli.train.events import Event
from medusa_cli.train.loop import train
from tests.run_folders import log_of


def settings(**changes) -> TrainSettings:
    values = {
        "batch_size": 32,
        "loss_chunk": 16,
        "max_steps": 10,
        "eval_steps": 2,
        "save_steps": 5,
        "weight_decay": 0.01,
    }
    return TrainSettings(**{"epochs": 100, **values, **changes})


def saved_steps(run) -> list[int]:
    return [int(file.stem.split("-")[1]) for file in sorted((run.folder / "checkpoints").iterdir())]


def die_at(run, step: int, kind: str = "train") -> None:
    """Make the run end as by Ctrl-C or a kill when this event is heard."""

    def on_event(event: Event) -> None:
        if (event.kind, event.step) == (kind, step):
            raise KeyboardInterrupt

    object.__setattr__(run.outlets, "on_event", on_event)


@pytest.mark.parametrize(
    ("kind", "step"), [("save", 5), ("train", 5), ("train", 6), ("eval", 8), ("train", 10), ("save", 10)]
)
@pytest.mark.parametrize("own_output", [False, True])
def test_a_run_that_was_stopped_ends_bit_equal_to_an_unbroken_one(make_heads, sets, make_run, own_output, kind, step):
    whole_run, whole = make_run("whole"), make_heads(own_output=own_output)
    train(whole, sets, settings(), 7, whole_run.checkpoints, whole_run.outlets)

    broken_run = make_run("broken")
    die_at(broken_run, step, kind)
    with pytest.raises(KeyboardInterrupt):
        train(make_heads(own_output=own_output), sets, settings(), 7, broken_run.checkpoints, broken_run.outlets)
    torch.manual_seed(12345)
    resumed_run, resumed = make_run("broken"), make_heads(own_output=own_output)
    last = train(resumed, sets, settings(), 7, resumed_run.checkpoints, resumed_run.outlets)

    assert all(torch.equal(resumed.state_dict()[name], value) for name, value in whole.state_dict().items())
    assert last.loss == [event for event in whole_run.events if event.kind == "eval"][-1].loss
    lines, expected = log_of(resumed_run.folder), log_of(whole_run.folder)
    assert lines == expected


@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_a_save_is_told_once_whenever_the_run_stops(make_heads, sets, make_run, kind, monkeypatch):
    run = make_run()
    if kind == "kill":  # between a save and the news of it
        die_at(run, 5, "eval")
        real = run.checkpoints.save
        monkeypatch.setattr(run.checkpoints, "save", lambda *given: real(*given) and exec("raise KeyboardInterrupt"))
    else:
        object.__setattr__(run.outlets, "stop_asked", lambda: run.events[-1].step == 5)
    with pytest.raises(KeyboardInterrupt):
        train(make_heads(), sets, settings(), 0, run.checkpoints, run.outlets)
    assert saved_steps(run) == [5]
    again = make_run()
    train(make_heads(), sets, settings(), 0, again.checkpoints, again.outlets)
    saves = [line["step"] for line in log_of(run.folder) if line["kind"] == "save"]
    assert saves == [5, 10]


def test_a_run_that_is_asked_to_stop_saves_the_step_it_is_at_and_ends_bit_equal(make_heads, sets, make_run):
    whole_run, whole = make_run("whole"), make_heads()
    train(whole, sets, settings(), 7, whole_run.checkpoints, whole_run.outlets)
    stopped = make_run("stopped")
    object.__setattr__(stopped.outlets, "stop_asked", lambda: stopped.events[-1].step == 7)
    with pytest.raises(KeyboardInterrupt):
        train(make_heads(), sets, settings(), 7, stopped.checkpoints, stopped.outlets)
    assert saved_steps(stopped) == [5, 7]
    again, resumed = make_run("stopped"), make_heads()
    train(resumed, sets, settings(), 7, again.checkpoints, again.outlets)
    assert next(event.step for event in again.events if event.kind == "train") == 8
    assert all(torch.equal(resumed.state_dict()[name], value) for name, value in whole.state_dict().items())


def test_the_last_two_checkpoints_are_kept(make_heads, sets, make_run):
    run = make_run()
    train(make_heads(), sets, settings(save_steps=2), 0, run.checkpoints, run.outlets)
    assert saved_steps(run) == [8, 10]


@pytest.mark.parametrize("way", ["replace", "fsync"])
def test_a_save_that_fails_keeps_the_one_before_and_can_be_gone_on_from(make_heads, sets, make_run, monkeypatch, way):
    run, real = make_run(), getattr(os, way)

    def full(*args):
        if run.events[-1].step == 10:
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, way, full)
    # the log is written through without either call, so only checkpoints fail
    run.events.append(Event("train", 0, 10, 0, 0, None, None, None, 0, 0))
    with pytest.raises(TrainingError, match="can't save step 10.*No space left") as caught:
        train(make_heads(), sets, settings(), 0, run.checkpoints, run.outlets)
    assert "--resume-from-checkpoint" in caught.value.hint
    monkeypatch.undo()
    assert saved_steps(run) == [5]

    again, heads = make_run(), make_heads()
    train(heads, sets, settings(), 0, again.checkpoints, again.outlets)
    assert [event.step for event in again.events if event.kind == "train"] == [6, 7, 8, 9, 10]


@pytest.mark.parametrize("damage", ["empty", "cut", "halved", "garbage", "text", "another's"])
def test_a_damaged_newest_checkpoint_falls_back_on_the_one_before(make_heads, sets, make_run, damage):
    run = make_run()
    train(make_heads(), sets, settings(), 0, run.checkpoints, run.outlets)
    newest = run.folder / "checkpoints" / "step-00000010.pt"
    whole = newest.read_bytes()
    spoilt = {
        "empty": b"",
        "cut": whole[:1000],
        "halved": whole[: len(whole) // 2],
        "garbage": bytes(range(256)) * 9,
        "text": b"not a checkpoint\n",
    }
    if damage == "another's":
        torch.save([1, 2], newest)
    else:
        newest.write_bytes(spoilt[damage])
    again = make_run()
    train(make_heads(), sets, settings(), 0, again.checkpoints, again.outlets)
    assert again.events[0].step == 6


def test_a_folder_of_damaged_checkpoints_is_an_error(make_heads, sets, make_run):
    run = make_run()
    (run.folder / "checkpoints").mkdir(parents=True)
    (run.folder / "checkpoints" / "step-00000010.pt").write_bytes(b"")
    with pytest.raises(TrainingError, match="can be read"):
        train(make_heads(), sets, settings(), 0, run.checkpoints, run.outlets)


@pytest.mark.parametrize(("change", "word"), [({"recipe": "other"}, "recipe"), ({"fingerprint": "xyz"}, "model")])
def test_a_folder_of_another_recipe_or_model_is_refused(make_heads, sets, make_run, change, word):
    run = make_run()
    train(make_heads(), sets, settings(), 0, run.checkpoints, run.outlets)
    other = make_run(**change)
    with pytest.raises(TrainingError, match=f"another {word}") as caught:
        train(make_heads(), sets, settings(), 0, other.checkpoints, other.outlets)
    assert "--output-dir" in caught.value.hint
    assert saved_steps(run) == [5, 10]


def test_a_training_set_that_has_changed_is_refused(make_heads, sets, make_run):
    run = make_run()
    train(make_heads(), sets, settings(), 0, run.checkpoints, run.outlets)
    with pytest.raises(TrainingError, match="another training set"):
        train(make_heads(), sets, settings(), 1, run.checkpoints, run.outlets)


def test_the_recipe_s_hash_changes_with_what_is_learned_and_with_nothing_else():
    base = recipe_hash(Recipe())
    shown = Recipe.model_validate(
        {"output_dir": "elsewhere", "target": {"device": "cpu"}, "train": {"save_steps": 7, "report_to": "wandb"}}
    )
    assert recipe_hash(shown) == base
    assert recipe_hash(Recipe.model_validate({"train": {"learning_rate": 0.5}})) != base
    assert recipe_hash(Recipe.model_validate({"seed": 1})) != base
    assert recipe_hash(Recipe.model_validate({"data": {"num_samples": 5}})) != base


def test_a_log_line_cut_short_by_a_kill_is_dropped(tmp_path):
    log = TrainLog(tmp_path)
    for step in (1, 2, 3):
        log.append({"step": step, "loss": 0.5})
    log.file.write_text(log.file.read_text() + '{"step": 4, "lo')
    log.file.write_bytes(log.file.read_bytes().replace(b"{", b"\xff\x00 no line\n[]\n{", 1))
    log.rewind(2)
    assert [json.loads(line)["step"] for line in log.file.read_text().splitlines()] == [1, 2]
