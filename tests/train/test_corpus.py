"""What each head is asked, and which tokens may be guessed."""

import numpy as np
import pytest
import torch

from medusa_cli.errors import TrainingError
from medusa_cli.train.corpus import NOT_ASKED, OUTSIDE, Corpus, Examples, choose_draft_ids

HEADS, VOCAB = 3, 50


def labels_by_place(examples: Examples) -> dict[int, list[int]]:
    return dict(zip(examples.places_N.tolist(), examples.labels_NK.tolist(), strict=True))


def test_head_k_is_asked_for_the_token_k_plus_2_places_on(make_sample):
    corpus = Corpus.from_samples([make_sample("a", [10, 11, 12, 13, 14, 15])])
    labels = labels_by_place(Examples.of(corpus, [0], torch.arange(VOCAB), HEADS))
    assert labels == {
        0: [12, 13, 14],
        1: [13, 14, 15],
        2: [14, 15, NOT_ASKED],
        3: [15, NOT_ASKED, NOT_ASKED],
    }


def test_no_head_is_asked_across_a_sample_s_end(make_sample):
    corpus = Corpus.from_samples([make_sample("a", [1, 2, 3]), make_sample("b", [4, 5, 6])])
    labels = labels_by_place(Examples.of(corpus, [0, 1], torch.arange(VOCAB), HEADS))
    assert labels == {0: [3, NOT_ASKED, NOT_ASKED], 3: [6, NOT_ASKED, NOT_ASKED]}


def test_only_supervised_tokens_are_asked_for(make_sample):
    corpus = Corpus.from_samples([make_sample("a", range(8), [False] * 3 + [True] * 2 + [False] * 3)])
    labels = labels_by_place(Examples.of(corpus, [0], torch.arange(VOCAB), HEADS))
    assert labels == {
        0: [NOT_ASKED, 3, 4],
        1: [3, 4, NOT_ASKED],
        2: [4, NOT_ASKED, NOT_ASKED],
    }


def test_tokens_outside_the_draft_vocabulary_are_counted_and_not_learned(make_sample):
    corpus = Corpus.from_samples([make_sample("a", [7, 7, 20, 30, 20, 40])])
    examples = Examples.of(corpus, [0], torch.tensor([20, 40]), 1)
    assert labels_by_place(examples) == {0: [0], 1: [OUTSIDE], 2: [0], 3: [1]}
    assert examples.coverage() == [0.75]


def test_samples_can_be_left_out_and_hidden_states_stay_with_their_places(corpus):
    examples = Examples.of(corpus, [3, 7], torch.arange(VOCAB), HEADS)
    assert {corpus.keys[s] for s in corpus.sample_of(examples.places_N)} == {"text-3", "text-7"}
    rows = np.array([5, 0])
    expected = torch.from_numpy(corpus.hidden_TH[examples.places_N[rows]]).float()
    assert torch.equal(examples.hidden(rows), expected)
    assert examples.names(np.array([0, 1, len(examples) - 1])) == ["text-3", "text-7"]


def test_a_set_without_a_supervised_token_is_an_error(make_sample):
    corpus = Corpus.from_samples([make_sample("a", range(8), [False] * 8), make_sample("b", [1, 2])])
    with pytest.raises(TrainingError, match="none of 2 samples"):
        Examples.of(corpus, [0, 1], torch.arange(VOCAB), HEADS)


def test_the_draft_vocabulary_holds_the_most_frequent_supervised_tokens(make_sample):
    ids = [9, 9, 9, 9, 5, 5, 5, 30, 30, 2]
    corpus = Corpus.from_samples([make_sample("a", ids, [False] * 4 + [True] * 6), make_sample("b", [41] * 9)])
    assert choose_draft_ids(corpus, [0], size=2, real_vocab=47).tolist() == [5, 30]


def test_a_draft_vocabulary_wider_than_the_text_fills_up_from_the_lowest_ids(make_sample):
    corpus = Corpus.from_samples([make_sample("a", [30, 30, 30])])
    assert choose_draft_ids(corpus, [0], size=4, real_vocab=47).tolist() == [0, 1, 2, 30]


@pytest.mark.parametrize("size", [0, 45, 47, 48, 1000])
def test_a_padding_row_never_joins_the_draft_vocabulary(make_sample, size):
    corpus = Corpus.from_samples([make_sample("a", [48, 49, 48, 49, 3])])
    ids = choose_draft_ids(corpus, [0], size=size, real_vocab=47)
    assert len(ids) == (45 if size == 45 else 47)
    assert int(ids.max()) < 47


def test_equal_texts_fall_on_the_same_side_of_the_split(make_sample):
    samples = [make_sample(f"{copy}-{text}", [text] * 5) for copy in range(4) for text in range(10)]
    corpus = Corpus.from_samples(samples)
    split = corpus.split(0.3, seed=1)
    texts = [{corpus.keys[s].split("-")[1] for s in side} for side in (split.train, split.held_out)]
    assert not texts[0] & texts[1]
    assert len(texts[1]) == 3
    assert sorted(split.train + split.held_out) == list(range(40))
    assert corpus.split(0.3, seed=1) == split
    assert corpus.split(0.3, seed=2) != split


def test_a_split_always_leaves_a_text_on_each_side(make_sample):
    corpus = Corpus.from_samples([make_sample("a", [1] * 5), make_sample("b", [2] * 5)])
    for held_out in (0.001, 0.49):
        split = corpus.split(held_out, seed=0)
        assert (len(split.train), len(split.held_out)) == (1, 1)
    with pytest.raises(TrainingError, match="one text"):
        Corpus.from_samples([make_sample("a", [1] * 5)]).split(0.1, seed=0)
