"""What training does to the heads, what it says, and what it leaves alone."""

import json
import math

import numpy as np
import pytest
import torch

from medusa_cli.config.recipe import TrainSettings
from medusa_cli.errors import TrainingError
from medusa_cli.train.corpus import Corpus, Examples, choose_draft_ids
from medusa_cli.train.loop import Sets, make_optimizer, train
from medusa_cli.train.measure import measure
from medusa_cli.train.order import Order, learning_rate

HEADS, REAL = 3, 47


def settings(**changes) -> TrainSettings:
    values = {"batch_size": 32, "loss_chunk": 16, "max_steps": 10, "eval_steps": 5, "save_steps": 5}
    return TrainSettings(**{**values, "epochs": 100, **changes})


def test_on_a_counting_sequence_head_i_learns_the_token_i_plus_2_places_on(make_heads, make_sample, make_run):
    texts = [[(start + place) % 10 for place in range(12 + start)] for start in range(10)]
    corpus = Corpus.from_samples([make_sample(str(start), text) for start, text in enumerate(texts)])
    ids = torch.arange(10)
    sets = Sets(Examples.of(corpus, range(8), ids, HEADS), Examples.of(corpus, [8, 9], ids, HEADS))
    heads = make_heads(draft_ids=range(10))
    run = make_run()
    last = train(heads, sets, settings(max_steps=150, learning_rate=0.03), 0, run.checkpoints, run.outlets)
    assert last.top1_K == [1.0] * HEADS
    accuracy = measure(heads, sets.held_out, num_ranks=4, chunk=16, source="counting").accuracy
    assert [row[0] for row in accuracy.plain] == [row[0] for row in accuracy.conditional] == [1.0] * HEADS


def test_the_target_s_output_matrix_is_not_touched(make_heads, sets, make_run, output_weight):
    before = output_weight.clone()
    run = make_run()
    heads = make_heads()
    train(heads, sets, settings(weight_decay=0.1), 0, run.checkpoints, run.outlets)
    assert torch.equal(output_weight, before)
    assert heads.weight.any()


def test_heads_of_a_padded_vocabulary_train_and_never_guess_a_padding_row(make_heads, corpus, make_run):
    ids = choose_draft_ids(corpus, range(10), size=0, real_vocab=REAL)
    sets = Sets(Examples.of(corpus, range(10), ids, HEADS), Examples.of(corpus, [10, 11], ids, HEADS))
    heads = make_heads(draft_ids=ids.tolist())
    run = make_run()
    train(heads, sets, settings(max_steps=2), 0, run.checkpoints, run.outlets)
    every_guess = heads.to_target_ids(heads(torch.randn(200, 16)).topk(REAL).indices)
    assert int(every_guess.max()) < REAL


def test_events_tell_every_step_each_evaluation_and_each_save(make_heads, sets, make_run):
    run = make_run()
    train(make_heads(), sets, settings(max_steps=7, eval_steps=3, save_steps=4), 0, run.checkpoints, run.outlets)
    heard = {kind: [e.step for e in run.events if e.kind == kind] for kind in ("train", "eval", "save")}
    assert heard == {"train": [1, 2, 3, 4, 5, 6, 7], "eval": [3, 6, 7], "save": [4, 7]}
    first, last = run.events[0], run.events[-1]
    assert first.total_steps == 7
    assert len(first.loss_K) == len(first.top1_K) == HEADS
    assert first.examples_per_second > 0
    assert last.seconds_left == 0
    assert last.epoch == pytest.approx(7 * 32 / len(sets.train))


def test_an_evaluation_tells_how_often_a_guess_is_right_where_those_before_are(make_heads, sets, make_run):
    run, heads = make_run(), make_heads()
    last = train(heads, sets, settings(max_steps=60, learning_rate=0.03), 0, run.checkpoints, run.outlets)
    accuracy = measure(heads, sets.held_out, num_ranks=4, chunk=16, source="counting").accuracy
    assert max(last.conditional_K) > 0
    assert last.conditional_K == pytest.approx([row[0] for row in accuracy.conditional])


def test_the_log_holds_every_event_once(make_heads, sets, make_run):
    run = make_run()
    train(make_heads(), sets, settings(), 0, run.checkpoints, run.outlets)
    lines = [json.loads(line) for line in (run.folder / "train.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["step"]) for line in lines] == [(event.kind, event.step) for event in run.events]


def test_nothing_is_printed(make_heads, sets, make_run, capsys):
    run = make_run()
    train(make_heads(), sets, settings(), 0, run.checkpoints, run.outlets)
    assert capsys.readouterr() == ("", "")


def test_a_state_that_is_not_a_number_stops_at_its_step_and_names_its_sample(make_heads, sets, make_run):
    order = Order(len(sets.train), 32, seed=0)
    bad = order.rows(2)[5]
    sets.train.corpus.hidden_TH[sets.train.places_N[bad]] = np.nan
    heads, run = make_heads(), make_run()
    with pytest.raises(TrainingError) as caught:
        train(heads, sets, settings(save_steps=1, epochs=1), 0, run.checkpoints, run.outlets)
    (name,) = sets.train.names(np.array([bad]))
    assert f"step 3: the loss is not finite on {name}" == caught.value.message
    assert [event.step for event in run.events if event.kind == "train"] == [1, 2]
    saved = torch.load(run.folder / "checkpoints" / "step-00000002.pt", weights_only=True)
    assert all(torch.equal(saved["heads"][key], value) for key, value in heads.state_dict().items())
    assert not (run.folder / "checkpoints" / "step-00000003.pt").exists()


def test_a_gradient_that_is_not_finite_stops_too(make_heads, sets, make_run):
    heads, run = make_heads(), make_run()
    heads.bias.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(TrainingError, match="step 1"):
        train(heads, sets, settings(), 0, run.checkpoints, run.outlets)
    assert not heads.weight.any()


def test_each_epoch_sees_every_example_once_in_another_order():
    order = Order(10, 4, seed=3)
    seen = np.concatenate([order.rows(step) for step in range(5)])
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert not np.array_equal(seen[:10], seen[10:])


def test_the_order_depends_on_the_seed_and_the_step_alone():
    forward = [Order(10, 4, seed=3).rows(step) for step in range(6)]
    order = Order(10, 4, seed=3)
    for step in reversed(range(6)):
        assert np.array_equal(order.rows(step), forward[step])
    assert not np.array_equal(Order(10, 4, seed=4).rows(0), forward[0])


@pytest.mark.parametrize(
    ("epochs", "max_steps", "expected"),
    [(1, None, 3), (2.0, None, 5), (0.1, None, 1), (0.01, None, 1), (2, 4, 4), (1, 9, 3)],
)
def test_epochs_may_be_fractions_and_max_steps_only_shortens(epochs, max_steps, expected):
    assert Order(10, 4, seed=0).total_steps(epochs, max_steps) == expected


def test_a_batch_is_never_larger_than_the_set():
    assert sorted(Order(3, 100, seed=0).rows(0)) == [0, 1, 2]


def test_the_rate_warms_up_to_the_asked_one_and_falls_to_nothing():
    rates = [learning_rate(step, 100, settings(learning_rate=1.0, warmup_ratio=0.1)) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] < 0.001
    assert learning_rate(0, 1, settings(learning_rate=1.0, warmup_ratio=0)) == 1.0


def test_only_matrices_decay(make_heads):
    heads = make_heads(own_output=True, output_bias=True)
    decayed, spared = make_optimizer(heads, settings(weight_decay=0.1)).param_groups
    assert [id(p) for p in decayed["params"]] == [id(heads.weight), id(heads.output_weight)]
    assert [id(p) for p in spared["params"]] == [id(heads.bias), id(heads.output_bias)]
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
