"""Whole texts read anew, what the target says of them, and the price of saying something else."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from medusa_cli.errors import TargetError
from medusa_cli.model.target import Target
from medusa_cli.train.corpus import Examples
from medusa_cli.train.joint.loop import JointTexts, check_logits
from medusa_cli.train.kl_loss import keep, predictions
from medusa_cli.train.texts import Texts
from tests.tiny_models import target_of, tiny_model
from tests.train.conftest import HEADS, PROMPT


def test_samples_in_the_order_of_their_keys_are_read_as_in_any_other(texts: JointTexts) -> None:
    corpus, every = texts.train.examples.corpus, torch.arange(int(texts.train.examples.corpus.ids_T.max()) + 1)
    turned = Texts(Examples.of(corpus, [5, 0, 3], every, HEADS), texts.train.prompts)
    assert turned.samples == [5, 0, 3]
    for sample in turned.samples:
        one, other = turned.read([sample]), texts.train.read([sample])
        assert torch.equal(one.ids_BT, other.ids_BT)
        assert torch.equal(one.asked_N, other.asked_N)
        assert torch.equal(one.learnt_P, other.learnt_P)
        places = (texts.examples.places_N[read.rows_N] for texts, read in ((turned, one), (texts.train, other)))
        assert np.array_equal(*places)


def test_a_sample_whose_prompt_is_not_known_is_left_out_where_others_are(texts: JointTexts) -> None:
    some = {key: ids for key, ids in texts.train.prompts.items() if key != "text-2"}
    assert replace(texts.train, prompts=some).samples == [0, 1, 3, 4, 5]


def test_the_logits_of_all_places_are_never_held(
    target: Target, largest_tensor: Callable[[Callable[[], object]], int]
) -> None:
    hidden_PH, own_PH = torch.randn(2, 200, target.hidden_size)
    chunk = 8
    largest = largest_tensor(lambda: keep(target, hidden_PH, own_PH, chunk=chunk, learn=True))
    assert largest <= max(chunk * target.vocab_size, hidden_PH.numel())
    assert largest < len(hidden_PH) * target.vocab_size


def test_pieces_give_the_gradient_of_the_whole(target: Target) -> None:
    hidden_PH, own_PH = torch.randn(2, 30, target.hidden_size)
    whole_PH = hidden_PH.clone().requires_grad_()
    own_PV, adapted_PV = target.logits_of(own_PH).log_softmax(-1), target.logits_of(whole_PH).log_softmax(-1)
    loss = torch.nn.functional.kl_div(adapted_PV, own_PV, log_target=True, reduction="batchmean")
    loss.backward()
    kept = keep(target, hidden_PH, own_PH, chunk=7, learn=True)
    assert torch.allclose(kept.grad_PH, whole_PH.grad, atol=1e-6)
    assert float(kept.divergence_P.mean()) == pytest.approx(float(loss.detach()), rel=1e-4)
    assert torch.equal(kept.same_P, own_PV.argmax(-1) == adapted_PV.argmax(-1))


def test_a_place_is_found_again_in_its_whole_text(texts: JointTexts) -> None:
    reading = texts.train.read([1, 4])
    flat, corpus = reading.ids_BT.flatten(), texts.train.examples.corpus
    places_N = texts.train.examples.places_N[reading.rows_N]
    assert flat[reading.asked_N].tolist() == corpus.ids_T[places_N].tolist()
    assert reading.ids_BT[0, :PROMPT].tolist() == list(texts.train.prompts["text-1"])
    # every token of an answer is learnt: predicted from the place before it
    answers = [corpus.ids_T[corpus.offsets_S[s] + 1 : corpus.offsets_S[s + 1]].tolist() for s in (1, 4)]
    assert flat[reading.learnt_P + 1].tolist() == [*answers[0], *answers[1]]
    assert reading.text_P.tolist() == [0] * len(answers[0]) + [1] * len(answers[1])


def test_reading_gives_the_stored_states_and_the_library_s_logits(texts: JointTexts, target: Target) -> None:
    reading = texts.train.read(texts.train.samples)
    stored = torch.from_numpy(texts.train.examples.corpus.hidden_TH[texts.train.examples.places_N]).float()
    hidden_BTH = target.read(reading.ids_BT, reading.lengths)
    assert torch.allclose(hidden_BTH.flatten(0, 1)[reading.asked_N], stored, atol=2e-3)
    logits_BTV = target.model(reading.ids_BT, use_cache=False).logits
    assert torch.allclose(target.logits_of(hidden_BTH), logits_BTV, atol=1e-5)


def test_what_a_target_says_of_text_is_its_perplexity_and_its_best_tokens(texts: JointTexts, target: Target) -> None:
    said = predictions(target, texts.held_out, batch_size=2, chunk=5)
    ids = torch.tensor([*texts.held_out.prompts["text-6"][:-1], *_ids(texts, 6)])
    logits_TV = target.model(ids[None]).logits[0, PROMPT - 1 : -1]
    surprise = torch.nn.functional.cross_entropy(logits_TV, ids[PROMPT:], reduction="none")
    assert torch.allclose(said.surprise_P[: len(surprise)], surprise, atol=1e-4)
    assert torch.equal(said.best_P[: len(surprise)], logits_TV.argmax(-1))
    assert said.agreement(said) == 1
    assert said.perplexity == pytest.approx(float(said.surprise_P.mean().exp()))


def _ids(texts: JointTexts, sample: int) -> list[int]:
    corpus = texts.held_out.examples.corpus
    return corpus.ids_T[corpus.offsets_S[sample] : corpus.offsets_S[sample + 1]].tolist()


@pytest.mark.parametrize("name", ["gemma2", "cohere", "granite", "gpt2"])
def test_logits_that_are_capped_or_scaled_are_known(name: str, texts: JointTexts) -> None:
    target = target_of(tiny_model(name))
    check_logits(target, texts.held_out)  # raises where they aren't
    ids_1T = torch.tensor([[5, 9, 2]])
    theirs = target.model(input_ids=ids_1T, use_cache=False).logits
    torch.testing.assert_close(target.logits_of(target.read(ids_1T, [3])), theirs, atol=1e-4, rtol=1e-4)


def test_logits_made_in_an_unknown_way_are_refused(
    texts: JointTexts, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "logits_of", lambda hidden: target.model.lm_head(hidden) * 1.5)
    with pytest.raises(TargetError, match="makes its logits in a way that can't be learnt through"):
        check_logits(target, texts.held_out)
