"""The figures a tree is made of, against decoding the same text one token at a time."""

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pytest
import torch

from medusa_cli.config.recipe import TrainSettings
from medusa_cli.errors import TrainingError
from medusa_cli.train.corpus import NOT_ASKED, OUTSIDE, Corpus, Examples
from medusa_cli.train.dynamic_replay import beliefs_at
from medusa_cli.train.loop import Sets, train
from medusa_cli.train.measure import (
    PathCounts,
    Ranks,
    accuracy_of,
    fit_tree_joint,
    measure,
    path_frequencies,
    rank_places,
)
from medusa_cli.trees.dynamic import DynamicShape
from medusa_cli.trees.files import read_measured
from medusa_cli.trees.tree import TokenTree

HEADS, RANKS, VALUES = 3, 4, 12
CHAIN = TokenTree.chain(HEADS).paths()


@pytest.fixture
def noisy(make_sample) -> Corpus:
    """Texts that mostly count up, and sometimes jump, after a prompt of three tokens."""
    rng = np.random.default_rng(5)
    samples = []
    for text in range(12):
        ids = [text]
        while len(ids) < 60:
            ids.append(int(rng.integers(VALUES)) if rng.random() < 0.2 else (ids[-1] + 1) % VALUES)
        samples.append(make_sample(str(text), ids, [place >= 3 for place in range(60)]))
    return Corpus.from_samples(samples)


@pytest.fixture
def trained(make_heads, noisy, make_run):
    """Heads that are right now and then, and the held-out examples; two tokens are outside the draft vocabulary."""
    ids = torch.arange(VALUES - 2)
    sets = Sets(Examples.of(noisy, range(8), ids, HEADS), Examples.of(noisy, range(8, 12), ids, HEADS))
    heads, run = make_heads(draft_ids=ids.tolist()), make_run()
    settings = TrainSettings(epochs=100, max_steps=60, batch_size=64, learning_rate=0.03)
    train(heads, sets, settings, 0, run.checkpoints, run.outlets)
    return heads, sets.held_out


@dataclass(frozen=True)
class Replay:
    """What decoding the held-out text with a tree would have taken: its steps, and the tokens they decided.

    accepted_D[d] is the number of steps that accepted at least d+1 guesses.
    """

    num_steps: int
    num_tokens: int
    accepted_D: list[int]


def replay(ranks: Ranks, ends: Sequence[int], tree: Iterable[Sequence[int]]) -> Replay:
    """Walk each held-out text as a decode with this tree (its rank paths) would: exact, since the text is greedy."""
    nodes = {tuple(path) for path in tree}
    num_steps = num_tokens = 0
    accepted_D = [0] * max((len(path) for path in nodes), default=0)
    for left, accepted in steps_of(ranks, ends, nodes):
        num_steps += 1
        num_tokens += min(accepted + 1, left)
        for depth in range(accepted):
            accepted_D[depth] += 1
    return Replay(num_steps, num_tokens, accepted_D)


def steps_of(ranks: Ranks, ends: Sequence[int], nodes: set[tuple[int, ...]]) -> Iterator[tuple[int, int]]:
    """Each step: the tokens the text still has after its root, and the guesses accepted."""
    not_before = -1
    for place, end, rank_K in zip(ranks.places_N.tolist(), ends, ranks.ranks_NK.tolist(), strict=True):
        if place < not_before:
            continue
        accepted = 0
        while accepted < len(rank_K) and tuple(rank_K[: accepted + 1]) in nodes:
            accepted += 1
        yield end - (place + 2), accepted
        # the bonus token becomes the next root, decided by the hidden state of the last accepted token
        not_before = place + accepted + 1


def ends_of(corpus: Corpus, ranks: Ranks) -> list[int]:
    """Where the text around each place ends: its sample's end, or the next token that is not learnt."""
    borders = np.union1d(np.flatnonzero(~corpus.supervised_T), corpus.offsets_S)
    return borders[np.searchsorted(borders, ranks.places_N + 1, side="right")].tolist()


def texts(corpus: Corpus, samples: range):
    """ids, hidden states and supervised flags of each sample."""
    for sample in samples:
        place = slice(int(corpus.offsets_S[sample]), int(corpus.offsets_S[sample + 1]))
        yield (
            corpus.ids_T[place].tolist(),
            torch.from_numpy(corpus.hidden_TH[place]).float(),
            corpus.supervised_T[place],
        )


def right_in_a_row(heads, ids: list[int], hidden_TH: torch.Tensor, place: int) -> int:
    """How many best guesses at a place equal the text, one head after another."""
    guesses = heads.to_target_ids(heads(hidden_TH[place]).argmax(-1)).tolist()
    right = 0
    while right < len(guesses) and place + 2 + right < len(ids) and guesses[right] == ids[place + 2 + right]:
        right += 1
    return right


def test_reported_accuracy_is_the_share_of_the_text_s_tokens_the_heads_guess(trained):
    heads, examples = trained
    accuracy = measure(heads, examples, num_ranks=RANKS, chunk=16, source="text").accuracy
    asked, right, asked_after, right_after = (Counter() for _ in range(4))
    for ids, hidden_TH, _ in texts(examples.corpus, range(8, 12)):
        for place in range(2, len(ids) - 2):
            guesses = heads.to_target_ids(heads(hidden_TH[place]).argmax(-1)).tolist()
            for head in range(min(HEADS, len(ids) - place - 2)):
                hit = guesses[head] == ids[place + 2 + head]
                asked[head] += 1
                right[head] += hit
                if right_in_a_row(heads, ids, hidden_TH, place) >= head:
                    asked_after[head] += 1
                    right_after[head] += hit
    assert [row[0] for row in accuracy.plain] == pytest.approx([right[k] / asked[k] for k in range(HEADS)])
    assert [row[0] for row in accuracy.conditional] == pytest.approx(
        [right_after[k] / asked_after[k] for k in range(HEADS)]
    )
    assert 0.3 < accuracy.plain[0][0] < 1
    assert accuracy.conditional[1][0] > accuracy.plain[1][0]


def test_the_order_in_which_samples_are_looked_at_changes_no_measurement(trained, noisy):
    heads, held_out = trained
    backwards = Examples.of(noisy, range(11, 7, -1), heads.draft_ids, HEADS)
    wanted, found = (measure(heads, examples, num_ranks=8, chunk=64, source="x") for examples in (held_out, backwards))
    assert found.accuracy == wanted.accuracy
    assert found.paths == wanted.paths
    beliefs = [
        beliefs_at(heads, examples, seen.ranks, num_ranks=8, most=10_000).replay(DynamicShape(4))
        for examples, seen in ((held_out, wanted), (backwards, found))
    ]
    assert beliefs[0] == beliefs[1]


def test_a_replay_takes_the_steps_a_chain_decode_takes(trained):
    heads, examples = trained
    ranks = rank_places(heads, examples, num_ranks=RANKS, chunk=16)
    measured = replay(ranks, ends_of(examples.corpus, ranks), CHAIN)
    steps, tokens, accepted = 0, 0, Counter()
    for ids, hidden_TH, supervised_T in texts(examples.corpus, range(8, 12)):
        place = int(np.argmax(supervised_T)) - 1
        while place + 2 < len(ids):
            right = right_in_a_row(heads, ids, hidden_TH, place)
            steps += 1
            tokens += min(right + 1, len(ids) - place - 2)
            accepted.update(range(right))
            place += right + 1
    assert (measured.num_steps, measured.num_tokens) == (steps, tokens)
    assert measured.accepted_D == [accepted[depth] for depth in range(HEADS)]
    assert tokens == 4 * (60 - 3 - 1), "every token after each text's first is decided once"


def test_ranks_are_places_among_the_best_guesses_and_tokens_outside_are_misses(trained):
    heads, examples = trained
    ranks = rank_places(heads, examples, num_ranks=RANKS, chunk=7)
    best_NKR = heads(torch.from_numpy(examples.corpus.hidden_TH[ranks.places_N]).float()).topk(RANKS).indices
    outside = 0
    for row, place in enumerate(ranks.places_N.tolist()):
        for head, label in enumerate(examples.labels_NK[examples.places_N.tolist().index(place)].tolist()):
            outside += label == OUTSIDE
            guesses = best_NKR[row, head].tolist()
            expected = NOT_ASKED if label == NOT_ASKED else guesses.index(label) if label in guesses else RANKS
            assert ranks.ranks_NK[row, head] == expected
    assert outside


def test_places_in_the_prompt_are_not_measured(make_heads, make_sample):
    corpus = Corpus.from_samples([make_sample("a", range(10), [False] * 4 + [True] * 6)])
    ranks = rank_places(make_heads(), Examples.of(corpus, [0], torch.arange(50), HEADS), num_ranks=RANKS, chunk=16)
    assert ranks.places_N.tolist() == [3, 4, 5, 6, 7]


def test_a_later_turn_is_measured_and_replayed_on_its_own(make_heads, make_sample):
    supervised = [False] * 2 + [True] * 4 + [False] * 3 + [True] * 4
    corpus = Corpus.from_samples([make_sample("a", range(13), supervised)])
    ranks = rank_places(make_heads(), Examples.of(corpus, [0], torch.arange(50), HEADS), num_ranks=RANKS, chunk=16)
    assert ranks.places_N.tolist() == [1, 2, 3, 8, 9, 10]
    assert ends_of(corpus, ranks) == [6, 6, 6, 13, 13, 13]
    assert replay(ranks, ends_of(corpus, ranks), []).num_tokens == 6


def test_text_without_a_place_to_stand_is_an_error(make_heads, make_sample):
    corpus = Corpus.from_samples([make_sample("a", range(6), [False] * 5 + [True])])
    examples = Examples.of(corpus, [0], torch.arange(50), HEADS)
    with pytest.raises(TrainingError, match="no place to measure"):
        measure(make_heads(), examples, num_ranks=RANKS, chunk=16, source="text")


def test_more_ranks_than_the_draft_vocabulary_holds_are_not_asked_for(make_heads, corpus):
    heads = make_heads(draft_ids=[1, 2, 3])
    examples = Examples.of(corpus, [0], torch.tensor([1, 2, 3]), HEADS)
    assert measure(heads, examples, num_ranks=32, chunk=16, source="text").accuracy.num_ranks == 3


def ranks_of(table: list[list[int]]) -> Ranks:
    """Ranks at successive places of one endless text."""
    places = np.arange(len(table))
    return Ranks(places, np.array(table, np.int16), RANKS)


def test_plain_conditional_and_joint_are_told_apart(make_heads, corpus):
    table = [[0, 0, 1], [0, 1, RANKS], [1, 0, 0], [RANKS, 0, 0]]
    examples = Examples.of(corpus, [0], torch.arange(50), HEADS)
    few = Examples(corpus, np.arange(4), examples.labels_NK[:4])
    accuracy = accuracy_of(ranks_of(table), few, "table")
    assert accuracy.plain[0] == [0.5, 0.25, 0, 0]
    assert accuracy.plain[1] == [0.75, 0.25, 0, 0]
    assert accuracy.conditional[0] == accuracy.plain[0]
    assert accuracy.conditional[1] == [0.5, 0.5, 0, 0]
    assert accuracy.conditional[2] == [0, 1, 0, 0]
    paths = path_frequencies(ranks_of(table))
    assert paths.positions == 4
    assert paths.counts == {(0,): 2, (0, 0): 1, (0, 0, 1): 1, (0, 1): 1, (1,): 1, (1, 0): 1, (1, 0, 0): 1}
    assert paths.probability((0,)) == 0.5
    assert paths.probability(()) == 1
    assert paths.probability((3,)) == 0


def random_ranks(num_places: int, rng) -> Ranks:
    """Heads that tend to be right together."""
    easy = rng.random(num_places) < 0.5
    table = np.where(rng.random((num_places, HEADS)) < np.where(easy, 0.9, 0.3)[:, None], 0, 1)
    table[rng.random((num_places, HEADS)) < 0.2] = RANKS
    return ranks_of(table.tolist())


def test_a_chain_decode_of_a_long_text_shows_the_conditional_accuracies(corpus, rng):
    ranks = random_ranks(40_000, rng)
    examples = Examples(corpus, ranks.places_N, np.zeros((40_000, HEADS), np.int32))
    accuracy = accuracy_of(ranks, examples, "random")
    chain = replay(ranks, [len(ranks.places_N) + 99] * len(ranks.places_N), CHAIN)
    shown = [now / before for now, before in zip(chain.accepted_D, [chain.num_steps, *chain.accepted_D], strict=False)]
    assert shown == pytest.approx([row[0] for row in accuracy.conditional], abs=0.02)
    assert accuracy.conditional[2][0] > accuracy.plain[2][0] + 0.05


def test_expected_tokens_of_a_tree_are_what_its_places_accept_on_average(rng):
    ranks = random_ranks(3_000, rng)
    paths = path_frequencies(ranks)
    tree = set(fit_tree_joint(paths, 5))
    accepted = 0
    for row in ranks.ranks_NK.tolist():
        accepted += max((n for n in range(HEADS + 1) if all(tuple(row[: d + 1]) in tree for d in range(n))), default=0)
    assert sum(paths.probability(path) for path in tree) == pytest.approx(accepted / 3_000)


def test_the_fitted_tree_is_the_best_of_all_trees_of_its_size(rng):
    paths = path_frequencies(random_ranks(500, rng))
    for size in range(4):
        fitted = fit_tree_joint(paths, size)
        TokenTree.from_paths(fitted)
        trees = (
            tree
            for tree in itertools.combinations(paths.counts, size)
            if all(p[:-1] in tree for p in tree if len(p) > 1)
        )
        best = max(sum(paths.counts[path] for path in tree) for tree in trees)
        assert sum(paths.counts[path] for path in fitted) == best


def test_a_tree_larger_than_what_was_ever_right_stays_smaller():
    paths = PathCounts(10, Counter({(0,): 3, (0, 0): 3}))
    assert fit_tree_joint(paths, 60) == [(0,), (0, 0)]


def test_measurements_are_saved_and_read_back(trained, tmp_path):
    heads, examples = trained
    measured = measure(heads, examples, num_ranks=RANKS, chunk=16, source="held-out text")
    measured.save(tmp_path, {1: 0.5, 8: 0.75})
    content = json.loads((tmp_path / "accuracy.json").read_text())
    assert {name: content[name] for name in asdict(measured.accuracy)} == asdict(measured.accuracy)
    assert content["path_positions"] == measured.paths.positions
    assert {tuple(path): count for path, count in content["paths"]} == measured.paths.counts
    known = read_measured(tmp_path)
    assert known.conditional_KR == measured.accuracy.conditional
    assert known.step_cost == {1: 0.5, 8: 0.75}
