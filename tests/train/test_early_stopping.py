"""Decodes while heads learn: when there is one, what they decide, and that a stop changes none of it."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from medusa_cli.config.loading import load_recipe
from medusa_cli.config.recipe import Recipe, TrainSettings
from medusa_cli.errors import RecipeError
from medusa_cli.heads.medusa import MedusaHeads
from medusa_cli.train import early_stopping
from medusa_cli.train.checkpoint import learning_settings, recipe_hash
from medusa_cli.train.early_stopping import Best, Decoded, Decoding
from medusa_cli.train.events import Event
from medusa_cli.train.loop import Sets, train
from tests.run_folders import log_of


def settings(**changes: Any) -> TrainSettings:
    values = {"batch_size": 32, "loss_chunk": 16, "max_steps": 12, "eval_steps": 6, "save_steps": 5, "decode_steps": 2}
    return TrainSettings(**{"epochs": 100, **values, **changes})


def weighing(heads: MedusaHeads) -> Decoded:
    """A figure that only the heads themselves decide, rising and falling as they learn."""
    return Decoded(1.0 + float(heads.weight.detach().double().square().sum().mul(1e5).sin().abs()), 1.0)


def in_turn(figures: Sequence[float]) -> Callable[[MedusaHeads], Decoded]:
    """These figures, whatever the heads are."""
    left: Iterator[float] = iter(figures)
    return lambda heads: Decoded(next(left), 1.0)


def decoding(sets: Sets, decode: Callable[[MedusaHeads], Decoded]) -> Sets:
    return replace(sets, decode=decode)


def steps_of(events: Sequence[Event], kind: str) -> list[int]:
    return [event.step for event in events if event.kind == kind]


def test_held_out_prompts_are_decoded_every_so_many_steps_and_at_the_end(make_heads, sets, make_run):
    run = make_run()
    asked = settings(decode_steps=5, patience=9)
    train(make_heads(), decoding(sets, weighing), asked, 0, run.checkpoints, run.outlets)
    assert steps_of(run.events, "decode") == [5, 10, 12]
    line = next(json.loads(line) for line in (run.folder / "train.jsonl").open() if '"decode"' in line)
    assert line["tokens_per_step"] > 1
    assert {"speedup", "decode_seconds", "best_step", "waited"} <= set(line)
    assert "loss" not in line


def test_no_decode_is_made_where_none_is_wanted(make_heads, sets, make_run):
    run = make_run()
    train(make_heads(), decoding(sets, weighing), settings(decode_steps=0), 0, run.checkpoints, run.outlets)
    assert steps_of(run.events, "decode") == []


def test_decodes_that_decide_nothing_are_few_and_no_clock_says_which(make_heads, monkeypatch):
    now = 0.0
    monkeypatch.setattr(early_stopping.time, "perf_counter", lambda: now)

    def made(seconds: float, best: Best | None = None, every: int = 1, begin: int = 0) -> list[int]:
        nonlocal now
        found, heads = [], make_heads()
        asked = settings(decode_steps=every, patience=best and best.patience)
        decoding = Decoding(in_turn([1.5] * 1000), asked, best, 1000)
        for step in range(begin + 1, 1001):
            now += seconds
            if decoding.after(step, heads, last=step == 1000) is not None:
                found.append(step)
        return found

    assert made(1.0) == made(0.001) == [112, 224, 336, 448, 560, 672, 784, 896, 1000]
    assert made(1.0, every=200) == [200, 400, 600, 800, 1000], "few enough are as asked for"
    assert made(1.0, begin=500) == [step for step in made(1.0) if step > 500], "a run that goes on makes the same"
    assert made(1.0, Best(5)) == list(range(1, 1001)), "where they decide what is kept, none is left out"


def test_training_stops_when_no_decode_was_better_for_so_long_and_the_best_heads_are_kept(make_heads, sets, make_run):
    run, heads, seen = make_run(), make_heads(), []

    def decode(heads: MedusaHeads) -> Decoded:
        seen.append({name: value.clone() for name, value in heads.state_dict().items()})
        return Decoded([1.2, 1.6, 1.5, 1.6, 1.3, 1.9][len(seen) - 1], 1.0)

    last = train(heads, decoding(sets, decode), settings(patience=3), 0, run.checkpoints, run.outlets)
    assert steps_of(run.events, "decode") == [2, 4, 6, 8, 10]
    assert steps_of(run.events, "train")[-1] == steps_of(run.events, "save")[-1] == last.step == 10
    ends = [(event.best_step, event.waited) for event in run.events if event.kind == "decode"]
    assert ends == [(2, 0), (4, 0), (4, 1), (4, 2), (4, 3)]
    assert all(torch.equal(heads.state_dict()[name], value) for name, value in seen[1].items())


def test_a_run_that_never_stops_still_keeps_the_best_heads(make_heads, sets, make_run):
    run, heads = make_run(), make_heads()
    figures = [1.2, 1.9, 1.5, 1.4, 1.3, 1.2]
    train(heads, decoding(sets, in_turn(figures)), settings(patience=6), 0, run.checkpoints, run.outlets)
    assert steps_of(run.events, "train")[-1] == 12
    saved = torch.load(run.folder / "checkpoints" / "step-00000012.pt", weights_only=True)["best"]
    assert saved["step"] == 4
    assert all(torch.equal(heads.state_dict()[name], value) for name, value in saved["heads"].items())


def test_without_patience_the_last_heads_are_stored_whatever_decodes_say(make_heads, sets, make_run):
    shown, plain = make_heads(), make_heads()
    run, other = make_run(), make_run("other")
    train(shown, decoding(sets, in_turn([9.0, *[1.0] * 9])), settings(), 0, run.checkpoints, run.outlets)
    train(plain, sets, settings(decode_steps=0), 0, other.checkpoints, other.outlets)
    assert all(torch.equal(shown.state_dict()[name], value) for name, value in plain.state_dict().items())


@pytest.mark.parametrize(("kind", "step"), [("decode", 4), ("train", 5), ("save", 5), ("train", 8), ("save", 10)])
@pytest.mark.parametrize("patience", [2, 20])
def test_a_run_that_was_stopped_ends_with_the_same_heads_best_and_count(
    make_heads, sets, make_run, patience, kind, step
):
    asked, with_decodes = settings(patience=patience), decoding(sets, weighing)
    whole_run, whole = make_run("whole"), make_heads()
    train(whole, with_decodes, asked, 7, whole_run.checkpoints, whole_run.outlets)

    broken_run = make_run("broken")

    def die(event: Event) -> None:
        if (event.kind, event.step) == (kind, step):
            raise KeyboardInterrupt

    object.__setattr__(broken_run.outlets, "on_event", die)
    if any((event.kind, event.step) == (kind, step) for event in whole_run.events):
        with pytest.raises(KeyboardInterrupt):
            train(make_heads(), with_decodes, asked, 7, broken_run.checkpoints, broken_run.outlets)
    torch.manual_seed(12345)
    resumed_run, resumed = make_run("broken"), make_heads()
    train(resumed, with_decodes, asked, 7, resumed_run.checkpoints, resumed_run.outlets)

    assert all(torch.equal(resumed.state_dict()[name], value) for name, value in whole.state_dict().items())
    lines, expected = log_of(resumed_run.folder), log_of(whole_run.folder)
    assert lines == expected


def test_a_run_that_stopped_early_has_nothing_to_do_when_it_goes_on(make_heads, sets, make_run):
    asked, figures = settings(patience=1), [1.5, 1.4]
    run, heads = make_run(), make_heads()
    train(heads, decoding(sets, in_turn(figures)), asked, 0, run.checkpoints, run.outlets)
    assert run.events[-1].step == 4
    again, kept = make_run(), make_heads()
    last = train(kept, decoding(sets, in_turn([])), asked, 0, again.checkpoints, again.outlets)
    assert again.events == []
    assert (last.step, last.loss is not None) == (4, True)
    assert all(torch.equal(kept.state_dict()[name], value) for name, value in heads.state_dict().items())


def test_patience_is_part_of_what_is_learnt_and_its_absence_changes_no_run_s_identity():
    plain, shown = Recipe(), Recipe.model_validate({"train": {"decode_steps": 7}})
    assert recipe_hash(shown) == recipe_hash(plain)
    assert not {"patience", "decode_steps"} & set(learning_settings(plain)["train"])
    hashes = {
        recipe_hash(Recipe.model_validate({"train": {"decode_steps": every, "patience": patience}}))
        for every, patience in ((7, 2), (7, 3), (8, 2), (7, None))
    }
    assert len(hashes) == 4


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"train.patience": 0}, "train.patience must be at least 1, not 0"),
        ({"train.patience": "long"}, "train.patience must be a whole number"),
        ({"train.decode_steps": -1}, "train.decode_steps must be at least 0, not -1"),
        ({"train.decode_steps": 2.5}, "train.decode_steps must be a whole number, not 2.5"),
        (
            {"train.decode_steps": 0, "train.patience": 3},
            "train has patience with decodes, and decode_steps 0, which makes none: leave one out",
        ),
    ],
)
def test_what_can_not_be_waited_for_is_told(given, said):
    with pytest.raises(RecipeError) as caught:
        load_recipe(None, (), given, {})
    assert said in caught.value.message
