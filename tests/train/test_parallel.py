"""Shares of a step and pieces of a share add up to the step; who gets which GPU; where a process stands."""

import numpy as np
import pytest
import torch

from medusa_cli.config.recipe import Recipe, TargetSettings, TrainSettings
from medusa_cli.errors import TrainingError
from medusa_cli.train.checkpoint import recipe_hash
from medusa_cli.train.loop import train
from medusa_cli.train.loss import combine, score_and_learn
from medusa_cli.train.parallel import ALONE, Processes, device_of
from medusa_cli.util.process_rank import Place, follows, place_of

TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1",
}  # fmt: skip


def share(rank: int, size: int, count: int) -> slice:
    group = Processes.__new__(Processes)
    group.place = Place(rank, size, rank, size)
    return group.share(count)


@pytest.mark.parametrize(("count", "size"), [(8, 2), (7, 3), (2, 4), (0, 2), (2048, 7)])
def test_shares_are_the_whole_in_order_and_nearly_equal(count, size):
    shares = [range(count)[share(rank, size, count)] for rank in range(size)]
    assert [row for one in shares for row in one] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert range(count)[ALONE.share(count)] == range(count)


@pytest.mark.parametrize("own_output", [False, True])
def test_gradients_of_shares_add_up_to_the_step_s_however_their_tokens_are_spread(make_heads, own_output):
    heads = make_heads(own_output=own_output, num_layers=2)
    torch.manual_seed(0)
    hidden_BH, labels_BK = torch.randn(40, 16), torch.randint(50, (40, 3))
    labels_BK[:25, 1] = -1  # the first share has nearly nothing for head 2
    labels_BK[30:, 2] = -2
    whole = score_and_learn(heads, hidden_BH, labels_BK, head_decay=0.7, chunk=8)
    wanted = {name: parameter.grad.clone() for name, parameter in heads.named_parameters()}
    heads.zero_grad(set_to_none=True)
    whole_K = (labels_BK >= 0).sum(0)
    cuts = [slice(0, 27), slice(27, 27), slice(27, 40)]
    parts = [
        score_and_learn(heads, hidden_BH[cut], labels_BK[cut], head_decay=0.7, chunk=8, whole_K=whole_K) for cut in cuts
    ]
    torch.testing.assert_close(combine(parts, 0.7).loss, whole.loss)
    for name, parameter in heads.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [1, 7, 31, 1000])
def test_a_step_taken_in_pieces_teaches_what_a_whole_one_does(make_heads, sets, make_run, size):
    settings = {"batch_size": 32, "loss_chunk": 16, "max_steps": 6, "save_steps": 5, "eval_steps": 3}
    whole, pieces, losses = make_heads(), make_heads(), []
    for heads, name, micro in ((whole, "whole", None), (pieces, "pieces", size)):
        run = make_run(name)
        train(heads, sets, TrainSettings(**settings, micro_batch_size=micro), 0, run.checkpoints, run.outlets)
        losses.append([event.loss for event in run.events if event.kind == "train"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(pieces.state_dict()[name], value, rtol=1e-3, atol=1e-5)


def test_memory_of_a_step_grows_with_the_piece_and_not_with_the_batch(make_heads, largest_tensor, rng):
    from medusa_cli.train.corpus import Corpus, Examples
    from medusa_cli.train.loop import Batch, learn_batch, make_optimizer
    from medusa_cli.train.order import Order
    from medusa_cli.train.store import Sample

    ids = rng.integers(0, 50, 3000).tolist()
    corpus = Corpus.from_samples([Sample("a", ids, torch.randn(3000, 16), [True] * 3000)])
    examples, heads = Examples.of(corpus, [0], torch.arange(50), 3), make_heads()
    from medusa_cli.train.checkpoint import TrainState

    def largest(batch_size: int, micro: int | None) -> int:
        settings = TrainSettings(batch_size=batch_size, loss_chunk=4, micro_batch_size=micro)
        state = TrainState(heads, make_optimizer(heads, settings), {})
        batch = Batch(1, Order(len(examples), batch_size, 0).rows(0), 0.0)
        return largest_tensor(lambda: learn_batch(state, examples, batch, settings, ALONE))

    parameters = max(parameter.numel() for parameter in heads.parameters())
    assert largest(2048, None) == 2 * largest(1024, None) > 2048 * 3 * 16 - 1
    # what is left of the whole batch is a loss for each place and head
    assert largest(1024, 64) == max(64 * 3 * 16, 1024 * 3, parameters)
    assert largest(2048, 64) == max(64 * 3 * 16, 2048 * 3, parameters)


def test_in_how_many_pieces_a_step_is_taken_may_change_from_run_to_run():
    assert recipe_hash(Recipe.model_validate({"train": {"micro_batch_size": 64}})) == recipe_hash(Recipe())


@pytest.mark.parametrize("value", [0, -1, "many", 1.5])
def test_a_piece_holds_at_least_one_place(value):
    with pytest.raises(ValueError, match="micro_batch_size"):
        TrainSettings(micro_batch_size=value)


def test_a_process_finds_its_place_in_what_a_launcher_left():
    assert place_of({}) == place_of({"WORLD_SIZE": "1", "RANK": "0"}) == Place()
    assert place_of({}).leads
    assert place_of(TORCHRUN) == Place(1, 4, 1, 2)
    assert not place_of(TORCHRUN).leads
    assert follows(TORCHRUN)
    assert not follows({**TORCHRUN, "RANK": "0"})
    assert not follows({})


@pytest.mark.parametrize(
    ("change", "word"),
    [({"RANK": "4"}, "contradict"), ({"RANK": "x"}, "RANK=x"), ({"WORLD_SIZE": "²"}, "no number"),
     ({"LOCAL_RANK": "2"}, "contradict"), ({"LOCAL_WORLD_SIZE": "5"}, "contradict")],
)  # fmt: skip
def test_a_place_that_can_not_be_is_refused(change, word):
    with pytest.raises(TrainingError, match=word):
        place_of({**TORCHRUN, **change})


def test_a_promise_of_others_without_a_way_to_meet_them_is_refused():
    with pytest.raises(TrainingError, match="MASTER_ADDR and MASTER_PORT are not set") as caught:
        place_of({"WORLD_SIZE": "2", "RANK": "0"})
    assert "unset WORLD_SIZE" in caught.value.hint


@pytest.fixture
def four_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


@pytest.mark.usefixtures("four_gpus")
def test_each_process_of_a_machine_takes_a_gpu_of_its_own():
    for wanted in ("auto", "cuda"):
        devices = [device_of(TargetSettings(device=wanted), Place(4 + rank, 8, rank, 4)) for rank in range(4)]
        assert devices == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert device_of(TargetSettings(device="cpu"), Place(1, 2, 1, 2)) == "cpu"
    assert device_of(TargetSettings(device="cuda:2"), Place()) == "cuda:2"
    assert device_of(TargetSettings(), Place()) == "auto"


@pytest.mark.usefixtures("four_gpus")
def test_processes_that_can_not_have_a_gpu_each_are_refused():
    with pytest.raises(TrainingError, match="5 processes .* torch sees 4") as caught:
        device_of(TargetSettings(), Place(0, 5, 0, 5))
    assert "launch 4" in caught.value.hint
    with pytest.raises(TrainingError, match="cuda:1 is one GPU for 2"):
        device_of(TargetSettings(device="cuda:1"), Place(0, 2, 0, 2))


def test_without_gpus_all_processes_share_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(TargetSettings(), Place(1, 2, 1, 2)) == "auto"


def test_a_leader_who_is_left_alone_says_what_the_others_said(monkeypatch):
    group = Processes.__new__(Processes)
    group.place, group._lost_one = Place(0, 2, 0, 2), False
    said = {}
    group._store = type("Store", (), {
        "check": lambda _, keys: all(key in said for key in keys),
        "set": lambda _, key, text: said.update({key: text.encode()}), "get": lambda _, key: said[key],
    })()  # fmt: skip
    assert group._lost("gone").message == "gone"
    other = Processes.__new__(Processes)
    other.place, other._lost_one, other._store = Place(1, 2, 1, 2), False, group._store
    other._leave_word(TrainingError("no hidden states in x", ""))
    assert group._lost("gone").message == "training process 1 of 2 ended: no hidden states in x"
    said.clear()
    other._lost("gone")
    other._leave_word(TrainingError("gone", ""))
    assert not said


def test_no_rows_at_all_are_one_empty_piece():
    from medusa_cli.train.loop import _pieces

    assert [len(piece) for piece in _pieces(np.arange(0), None)] == [len(p) for p in _pieces(np.arange(0), 5)] == [0]
    assert [piece.tolist() for piece in _pieces(np.arange(5), 2)] == [[0, 1], [2, 3], [4]]
