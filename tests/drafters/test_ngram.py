"""Guesses copied from the text: found where the last tokens stood before, and believed as far as they came true."""

import torch

from medusa_cli.contracts import Context
from medusa_cli.drafters.ngram import DEPTH, KEPT, LONGEST, Belief, Index, Ngrams
from medusa_cli.drafters.trie import Trie


def index_of(*pieces: list[int]) -> Index:
    index, text = Index(), []
    for piece in pieces:
        text = [*text, *piece]
        index.read(text)
    return index


def test_what_followed_the_last_tokens_is_found_wherever_the_text_was_cut() -> None:
    text = [1, 2, 3, 4, 5, 9, 1, 2, 3]
    for cut in range(1, len(text)):
        (first, *_) = index_of(text[:cut], text[cut:]).continuations()
        assert first == (3, [4, 5, 9, 1, 2, 3, 4, 5, 9, 1])


def test_the_longest_match_comes_first_and_then_the_latest() -> None:
    found = index_of([5, 1, 7, 6, 1, 8, 5, 1, 9, 6, 1]).continuations()
    assert [(length, copied[:3]) for length, copied in found] == [(2, [8, 5, 1]), (1, [9, 6, 1]), (1, [7, 6, 1])]


def test_a_copy_that_reaches_the_end_goes_on_in_a_loop() -> None:
    assert index_of([4, 1, 2, 3, 1]).continuations() == [(1, [2, 3, 1, 2, 3, 1, 2, 3, 1, 2])]


def test_a_text_without_a_repeat_gives_nothing() -> None:
    assert index_of([1, 2, 3, 4]).continuations() == []
    assert index_of([1]).continuations() == []


def test_matches_and_copies_are_bounded() -> None:
    found = index_of([1] * 300).continuations()
    assert len(found) <= KEPT * LONGEST
    assert max(length for length, _ in found) == LONGEST
    assert {len(copied) for _, copied in found} == {DEPTH}


def test_belief_follows_what_came_true() -> None:
    belief = Belief()
    before = belief.chance(2, 0)
    for _ in range(50):
        belief.learn(2, [4, 5], [4, 6])
    assert belief.chance(2, 0) > 0.9 > before
    assert belief.chance(2, 1) < 0.1
    assert belief.chance(3, 0) == Belief().chance(3, 0), "another length is another matter"


def test_chances_fall_along_a_copy_and_are_learnt_from_the_next_context() -> None:
    source, tokens = Ngrams(), [1, 2, 3, 1, 2]
    context = Context([tokens], torch.tensor([2]), torch.zeros(1, 4))
    source.join(0, [tokens[:-1]], None)
    trie = Trie(2)
    source.add_guesses(context, [trie], 0.0)
    assert trie.tokens[1:4] == [3, 1, 2]
    assert all(child <= trie.chances[parent] for child, parent in zip(trie.chances, trie.parents, strict=True))
    again = Trie(1)
    source.add_guesses(Context([[*tokens, 3, 1]], torch.tensor([1]), torch.zeros(1, 4)), [again], 0.0)
    fresh, learnt = Belief(), source._belief
    assert learnt.chance(2, 0) > fresh.chance(2, 0)
    assert learnt.chance(2, 1) > fresh.chance(2, 1)


def test_a_row_that_joins_copies_nothing_from_the_texts_before() -> None:
    source = Ngrams()
    grown = []
    for tokens in ([7, 8, 9, 7], [1, 2, 3, 7]):
        context = Context([tokens], torch.tensor([7]), torch.zeros(1, 4))
        source.join(0, [tokens[:-1]], None)
        trie = Trie(7)
        source.add_guesses(context, [trie], 0.0)
        grown.append(trie.tokens[1:3])
    assert grown == [[8, 9], []]
