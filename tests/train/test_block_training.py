"""Block heads learn in the loop of all heads: what they see, what they are asked, what it costs, how a run goes on."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from medusa_cli.config.recipe import LossSettings, TrainSettings
from medusa_cli.heads.block import BlockHeads
from medusa_cli.model.target import Target
from medusa_cli.pipeline.inner_states import reader_of
from medusa_cli.train.corpus import Corpus
from medusa_cli.train.dynamic_replay import beliefs_at
from medusa_cli.train.loop import Sets, train
from medusa_cli.train.loss import Teacher, score, score_and_learn
from medusa_cli.train.measure import measure
from medusa_cli.train.order import TextOrder
from medusa_cli.train.store import HiddenStore, Inner, Sample
from medusa_cli.train.text_examples import Examples, TextExamples, evened, examples_of
from medusa_cli.trees.dynamic import DynamicShape
from tests.block_heads import PLACES, block_config, block_heads
from tests.run_folders import log_of
from tests.tiny_models import greedy_of, prompt_of, target_of, tiny_model

LENGTHS = (5, 9, 7, 4, 8, 6, 5, 9)
LOSSES = LossSettings(ce=0.1, l1=0.9)


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of(tiny_model("llama", num_hidden_layers=4))


def text_samples(target: Target, taps: tuple[int, ...]) -> list[Sample]:
    """Whole texts: a prompt, what the target writes after it, and its states."""
    samples = []
    for number, length in enumerate(LENGTHS):
        prompt = prompt_of(length, number)
        ids = prompt + greedy_of(target.model, prompt, 14)
        states = target.states([ids], taps=taps)
        assert states.taps_BNLH is not None
        asked = [False] * length + [True] * 14
        samples.append(Sample(f"text-{number}", ids, states.hidden_BNH[0], asked, evened(states.taps_BNLH[0])))
    return samples


@pytest.fixture(scope="module")
def corpus(target: Target) -> Corpus:
    return Corpus.from_samples(text_samples(target, block_heads(target).config.wanted_taps))


def examples(heads: BlockHeads, corpus: Corpus, samples: range = range(8)) -> Examples:
    return examples_of(corpus, samples, heads.draft_ids, heads.config)


def learner(target: Target) -> BlockHeads:
    return block_heads(target).requires_grad_(True)


def test_an_example_sees_its_text_up_to_its_place(target: Target, corpus: Corpus) -> None:
    heads = block_heads(target)
    found = examples(heads, corpus)
    assert isinstance(found, TextExamples)
    rows = np.array([30, 2, 31, 57])
    together = heads.block_forward(found.inputs(heads, rows, heads.device, heads.dtype))
    for number, row in enumerate(rows):
        place = int(found.places_N[row])
        start = int(corpus.offsets_S[corpus.sample_of(np.array([place]))[0]])
        text = corpus.ids_T[start : place + 1].tolist()
        states = target.states([text], taps=heads.config.wanted_taps).taps_BNLH
        assert states is not None
        inputs = found.inputs(heads, rows[number : number + 1], heads.device, heads.dtype)
        torch.testing.assert_close(inputs.states_STX[0], evened(states[0]), rtol=0.01, atol=0.01)  # 16 bits
        assert inputs.ids_BK[0].tolist() == corpus.ids_T[place + 1 : place + 1 + PLACES].tolist()
        torch.testing.assert_close(heads.block_forward(inputs)[0], together[number], rtol=1e-3, atol=1e-3)


def test_the_target_run_again_shows_what_was_stored(target: Target, corpus: Corpus) -> None:
    heads = block_heads(target)
    stored = examples(heads, corpus)
    reader = reader_of(target, heads.config.wanted_taps)
    again = examples_of(replace(corpus, taps_TX=None), range(8), heads.draft_ids, heads.config, reader)
    rows = np.arange(0, len(stored), 7)
    one, other = (each.inputs(heads, rows, heads.device, heads.dtype).states_STX for each in (stored, again))
    seen = stored.inputs(heads, rows, heads.device, heads.dtype).blocks
    for text in range(len(one)):
        length = int(seen.place_B[seen.text_B == text].max()) + 1
        torch.testing.assert_close(one[text, :length], other[text, :length], rtol=0.01, atol=0.01)


def test_states_that_decided_the_labels_give_them_back(target: Target, corpus: Corpus) -> None:
    heads = block_heads(target)
    found = examples(heads, corpus)
    rows = np.arange(len(found))
    best = (found.decided(rows) @ target.output_weight.T).argmax(-1)
    labels = found.labels(rows)
    asked = labels >= 0
    ids = heads.draft_ids[labels.clamp(min=0)]
    assert (best[asked] == ids[asked]).float().mean() > 0.99


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_an_epoch_draws_its_share_of_each_text_anew_and_keeps_texts_together(share: float) -> None:
    texts = np.repeat([4, 2, 9], [8, 3, 12])
    order = TextOrder(texts, 5, seed=3, share=share)
    epochs = [order._permutation(epoch) for epoch in range(3)]
    for drawn in epochs:
        assert len(drawn) == order.num_examples == sum(max(1, round(share * count)) for count in (8, 3, 12))
        assert len(set(drawn.tolist())) == len(drawn)
        where = texts[drawn]
        assert len(np.flatnonzero(np.diff(where))) == 2, "each text once"
    assert any(not np.array_equal(epochs[0], other) for other in epochs[1:])
    again = TextOrder(texts, 5, seed=3, share=share)
    assert all(np.array_equal(order.rows(step), again.rows(step)) for step in (7, 0, 3))


def test_a_share_of_places_is_drawn_anew_for_other_heads_too(corpus: Corpus) -> None:
    plain = Examples.of(corpus, range(8), torch.arange(97), 2)
    order = plain.order(10_000, 0, 0.5)
    first, second = order._permutation(0), order._permutation(1)
    assert len(first) == round(0.5 * len(plain))
    assert set(first.tolist()) != set(second.tolist())


def by_autograd(heads: BlockHeads, inputs, labels_BK, hidden_BKH, losses: LossSettings, decay: float) -> torch.Tensor:
    blocks = heads.block_forward(inputs)
    logits = heads.projection(0).logits(blocks)
    theirs = (hidden_BKH @ heads.shared_weight.T).softmax(-1)
    ours = logits.softmax(-1)
    asked = labels_BK >= 0
    entropy = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels_BK.clamp(min=0).flatten(), reduction="none"
    )
    distance = (ours - theirs).abs().sum(-1)
    kl = (theirs * (theirs.log() - ours.log())).sum(-1)
    each = losses.ce * entropy.view_as(labels_BK) + losses.l1 * distance + losses.kl * kl
    judged = torch.nn.functional.binary_cross_entropy_with_logits(
        heads.confidence(blocks.detach()), (1 - distance / 2).detach(), reduction="none"
    )
    weight = decay ** torch.arange(labels_BK.shape[1]) / asked.sum(0).clamp(min=1)
    (weight * asked * (each + judged)).sum().backward()
    return (weight * asked * each).sum().detach()


@pytest.mark.parametrize("losses", [LOSSES, LossSettings(ce=0, l1=0, kl=1), LossSettings(ce=0.3, l1=0.2, kl=0.7)])
@pytest.mark.parametrize("chunk", [5, 1000])
def test_the_gradient_written_by_hand_is_autograd_s(
    target: Target, corpus: Corpus, losses: LossSettings, chunk: int
) -> None:
    heads, other = learner(target), learner(target)
    found = examples(heads, corpus)
    rows = np.array([0, 3, 20, 21, 50])
    labels, hidden = found.labels(rows), found.decided(rows)
    inputs = found.inputs(heads, rows, heads.device, heads.dtype)
    scores = score_and_learn(heads, inputs, labels, head_decay=0.8, chunk=chunk, teacher=Teacher(hidden, losses))
    loss = by_autograd(other, inputs, labels, hidden, losses, 0.8)
    torch.testing.assert_close(scores.loss, loss, rtol=1e-4, atol=1e-5)
    for (name, one), (_, wanted) in zip(heads.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(one.grad, wanted.grad, rtol=1e-3, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")
    without = score(heads, inputs, labels, head_decay=0.8, chunk=chunk, teacher=Teacher(hidden, losses))
    torch.testing.assert_close(without.loss, scores.loss)


@pytest.mark.parametrize("cuts", [[slice(0, 4), slice(4, 9)], [slice(0, 9), slice(9, 9)]])
def test_parts_of_a_step_add_up_to_the_whole_also_where_one_is_empty(
    target: Target, corpus: Corpus, cuts: list[slice]
) -> None:
    heads, other = learner(target), learner(target)
    found, rows = examples(heads, corpus), np.array([0, 3, 20, 21, 50, 51, 52, 70, 71])
    for one, parts in ((heads, [slice(0, 9)]), (other, cuts)):
        for part in parts:
            some = rows[part]
            score_and_learn(
                one,
                found.inputs(one, some, one.device, one.dtype),
                found.labels(some),
                head_decay=0.8,
                chunk=64,
                whole_K=found.counts(rows),
                teacher=Teacher(found.decided(some), LOSSES),
            )
    for (name, ours), (_, theirs) in zip(heads.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(
            ours.grad, theirs.grad, rtol=1e-3, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_medusa_heads_learn_from_the_target_s_chances_too(target: Target, corpus: Corpus) -> None:
    from tests.drafters.test_dynamic_drafter import random_heads

    heads = random_heads(target).requires_grad_(True)
    found = Examples.of(corpus, range(8), heads.draft_ids, 3)
    rows = np.arange(40)
    inputs, labels = found.inputs(heads, rows, heads.device, heads.dtype), found.labels(rows)
    teacher = Teacher(found.decided(rows), LossSettings(ce=0, kl=1))
    optimizer = torch.optim.Adam(heads.parameters(), 0.01)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        losses.append(float(score_and_learn(heads, inputs, labels, head_decay=1, chunk=64, teacher=teacher).loss))
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]


def settings(**changes) -> TrainSettings:
    values = {"batch_size": 16, "loss_chunk": 32, "max_steps": 10, "eval_steps": 4, "save_steps": 5, "epochs": 100}
    learning = {"learning_rate": 3e-3, "losses": LOSSES, "place_share": 0.5, "clip": 1.0, "head_decay": 0.78}
    return TrainSettings(**{**values, **learning, **changes})


@pytest.mark.parametrize(("kind", "step"), [("save", 5), ("train", 7), ("train", 10)])
def test_a_run_that_was_stopped_ends_bit_equal_to_an_unbroken_one(
    target: Target, corpus: Corpus, make_run: Callable, kind: str, step: int
) -> None:
    from tests.train.test_checkpoint import die_at

    def sets_of(heads: BlockHeads) -> Sets:
        return Sets(examples(heads, corpus, range(6)), examples(heads, corpus, range(6, 8)))

    whole_run, whole = make_run("whole"), learner(target)
    train(whole, sets_of(whole), settings(), 7, whole_run.checkpoints, whole_run.outlets)
    broken_run, broken = make_run("broken"), learner(target)
    die_at(broken_run, step, kind)
    with pytest.raises(KeyboardInterrupt):
        train(broken, sets_of(broken), settings(), 7, broken_run.checkpoints, broken_run.outlets)
    torch.manual_seed(12345)
    resumed_run, resumed = make_run("broken"), learner(target)
    train(resumed, sets_of(resumed), settings(), 7, resumed_run.checkpoints, resumed_run.outlets)
    assert all(torch.equal(resumed.state_dict()[name], value) for name, value in whole.state_dict().items())
    assert log_of(resumed_run.folder) == log_of(whole_run.folder)


def test_they_learn_and_what_is_measured_is_what_they_guess(target: Target, corpus: Corpus, make_run: Callable) -> None:
    heads = BlockHeads.fresh(block_config(target, draft_vocab=97), torch.arange(97), target.output_weight)
    heads.start_at(torch.from_numpy(corpus.hidden_TH))
    found, run = examples(heads, corpus), make_run()
    learning = settings(max_steps=150, eval_steps=150, learning_rate=0.01, losses=LossSettings())
    train(heads, Sets(found, found), learning, 0, run.checkpoints, run.outlets)
    losses = [event.loss for event in run.events if event.kind == "train"]
    assert losses[-1] < 0.6 * losses[0]
    heads.requires_grad_(False)
    measured = measure(heads, found, num_ranks=8, chunk=64, source="here")
    assert measured.accuracy.plain[0][0] > 0.5
    beliefs = beliefs_at(heads, found, measured.ranks, num_ranks=8, most=100)
    tokens = [beliefs.replay(DynamicShape(size)).tokens for size in (1, 4, 16)]
    assert 1.3 < tokens[0] < tokens[1] <= tokens[2]
    floored = beliefs.replay(DynamicShape(16, 0.3))
    assert max(floored.sizes) < 17
    assert floored.tokens <= tokens[2]
    assert beliefs.replay(DynamicShape(16, 0.99)).sizes[1] > 0, "hard places get no guess"


def test_a_store_of_inner_states_comes_back_and_is_told_from_others(target: Target, tmp_path) -> None:
    taps = block_heads(target).config.wanted_taps
    width = len(taps) * target.tap_size
    named = {"hidden_size": target.hidden_size, "fingerprint": "f", "longest": 40}
    samples = text_samples(target, taps)[:3]
    with HiddenStore(tmp_path, inner=Inner(taps, width), **named) as store:
        for sample in samples:
            store.append(sample)
    with (tmp_path / "taps.f16").open("ab") as stream:
        stream.write(b"left by a kill")
    HiddenStore(tmp_path, inner=Inner(taps, width), **named).close()
    corpus = Corpus.open(tmp_path)
    assert corpus.taps_TX is not None
    assert isinstance(corpus.taps_TX, np.memmap)
    wanted = torch.cat([sample.taps for sample in samples]).half().numpy()
    assert np.array_equal(corpus.taps_TX, wanted)
    with pytest.raises(Exception, match="for other heads, or with another train.states"):
        HiddenStore(tmp_path, inner=Inner((0,), target.tap_size), **named)
    with pytest.raises(Exception, match="for other heads, or with another train.states"):
        HiddenStore(tmp_path, **named)
    damaged = bytearray((tmp_path / "taps.f16").read_bytes())
    damaged[100] ^= 1
    (tmp_path / "taps.f16").write_bytes(damaged)
    with pytest.raises(Exception, match="is not as it was written"):
        Corpus.open(tmp_path)
