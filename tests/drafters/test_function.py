"""Guesses of any function: all that it may return, what it may get wrong, and that it is told once and left out."""

import itertools
import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from medusa_cli import reference
from medusa_cli.contracts import Context
from medusa_cli.drafters.function import DEEPEST, FunctionGuesses
from medusa_cli.drafters.trie import Trie
from medusa_cli.errors import PartError

VOCAB = 50


def source_of(returned: Any, errors: Any = "warn") -> FunctionGuesses:
    return FunctionGuesses(lambda tokens: returned, VOCAB, "python:mine:guess", errors)


def guessed(source: FunctionGuesses, tokens: Sequence[int] = (1, 2)) -> Trie:
    trie = Trie(tokens[-1])
    source.add_guesses(Context([list(tokens)], torch.tensor([tokens[-1]]), torch.zeros(1, 4)), [trie], 0.0)
    return trie


def paths_of(trie: Trie) -> set[tuple[int, ...]]:
    """Every path from the root."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(trie.tokens[1:], trie.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return set(paths[1:])


def drawn_trie() -> reference.Trie:
    trie = reference.Trie()
    node = trie.add(0, 4, 0.8)
    trie.add(node, 5, 0.6)
    trie.add(0, 6, 0.1)
    return trie


@pytest.mark.parametrize(
    ("returned", "paths"),
    [
        (None, set()),
        ([], set()),
        ([[]], set()),
        ([4, 5], {(4,), (4, 5)}),
        (torch.tensor([4, 5]), {(4,), (4, 5)}),
        (range(4, 6), {(4,), (4, 5)}),
        ([[4, 5], [4, 6], [7]], {(4,), (4, 5), (4, 6), (7,)}),
        ([(4, 5), (4, 6)], {(4,), (4, 5), (4, 6)}),
        ([([4, 5], 0.5), ([7], [0.2])], {(4,), (4, 5), (7,)}),
        (drawn_trie(), {(4,), (4, 5), (6,)}),
    ],
)
def test_paths_pairs_and_tries_are_guesses(returned: Any, paths: set[tuple[int, ...]]) -> None:
    assert paths_of(guessed(source_of(returned))) == paths


def test_chances_that_are_told_are_taken_as_they_are() -> None:
    assert guessed(source_of([([4, 5], 0.25)])).chances[1:] == pytest.approx([0.5, 0.25])
    assert guessed(source_of([([4, 5], [0.5, 0.4])])).chances[1:] == pytest.approx([0.5, 0.2])
    assert guessed(source_of(drawn_trie())).chances[1:] == pytest.approx([0.8, 0.6, 0.1])


def test_earlier_paths_are_surer_until_it_is_learnt_which_are() -> None:
    source = source_of([[4], [5]])
    first = guessed(source).chances[1:]
    assert first[0] > first[1]
    tokens = [1, 2]
    for _ in range(30):
        tokens = [*tokens, 5]
        learnt = guessed(source, tokens).chances[1:]
    assert learnt[1] > 0.9 > 0.1 > learnt[0]


def test_what_has_no_end_is_looked_at_so_far() -> None:
    assert len(guessed(source_of(itertools.repeat(7))).tokens) - 1 == DEEPEST
    assert len(guessed(source_of([number % VOCAB] for number in itertools.count())).tokens) - 1 == VOCAB
    assert max(map(len, paths_of(guessed(source_of([itertools.repeat(7)]))))) == DEEPEST


def fails(tokens: Sequence[int]) -> list[int]:
    raise ZeroDivisionError("by nothing")


RUBBISH = [
    (7, "returned 7, which is neither a path of token ids nor paths"),
    ("words", "returned 'words', which is neither"),
    ([1.5], "guesses 1.5, which is no path of token ids"),
    (["a"], "guesses 'a', which is no path"),
    ([["a"]], "guesses 'a', which is no token id"),
    ([-1], r"guesses -1, which is no token of this model \(0 to 49\)"),
    ([VOCAB], "guesses 50, which is no token of this model"),
    ([([4], 2.0)], "gives 2.0 as a probability"),
    ([([4], float("nan"))], "gives nan as a probability"),
    ([([4], "sure")], "gives 'sure' as a probability"),
    ([([4], None)], "gives None as a probability"),
]


@pytest.mark.parametrize(("returned", "told"), RUBBISH)
def test_rubbish_is_told_once_and_left_out(returned: Any, told: str, caplog: pytest.LogCaptureFixture) -> None:
    source = source_of(returned)
    with caplog.at_level(logging.WARNING):
        assert [len(guessed(source).tokens) for _ in range(3)] == [1, 1, 1]
    (record,) = caplog.records
    assert record.getMessage().startswith("python:mine:guess ")
    assert record.getMessage().endswith("; decoding goes on without its guesses")
    with pytest.raises(PartError, match=f"^python:mine:guess {told}"):
        guessed(source_of(returned, "raise"))


def test_a_failure_is_told_with_its_place(caplog: pytest.LogCaptureFixture) -> None:
    source, asked = FunctionGuesses(fails, VOCAB, "python:mine:guess"), []
    with caplog.at_level(logging.WARNING):
        guessed(source)
    (record,) = caplog.records
    place = f"{__file__}:{fails.__code__.co_firstlineno + 1}"
    assert f"failed at {place}: ZeroDivisionError: by nothing" in record.getMessage()
    source._guess = asked.append
    guessed(source)
    assert asked == [], "it is asked no more"
    with pytest.raises(PartError, match="ZeroDivisionError"):
        guessed(FunctionGuesses(fails, VOCAB, "python:mine:guess", "raise"))
