"""How often each guess of each head is right, on held-out text that the target wrote by greedy decoding.

All figures come from one table: the rank that the true token has among a head's guesses, for each place where decoding
could stand. A token outside the draft vocabulary is a miss: served heads can't guess it either.

plain        P(rank r of head k is right)
conditional  the same, given that the best guesses of all heads before k were right
joint        P(path (r0, r1, ...) is right), which is what a tree is made of: heads are right together more often than
             their plain accuracies multiplied would say

Shape letters: N places, B rows at once, K heads, R ranks, W draft vocabulary.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from medusa_cli.errors import TrainingError
from medusa_cli.heads.base import Heads
from medusa_cli.train.corpus import NOT_ASKED, Examples
from medusa_cli.trees.tree import Path as TreePath
from medusa_cli.util.files import write_atomically

_SAVED_PATHS = 4096
_BATCH = 1024


@dataclass(frozen=True)
class Ranks:
    """ranks_NK int16: the true token's rank among head k's guesses at places_N of a corpus.

    num_ranks stands for a miss, NOT_ASKED for a token past the text's end.
    """

    places_N: NDArray[np.int64]
    ranks_NK: NDArray[np.int16]
    num_ranks: int


@dataclass(frozen=True)
class Accuracy:
    """plain[k][r] and conditional[k][r] of the module docstring, over `positions` places; `source` names the text.

    coverage[k] is the share of head k's true tokens that are in the draft vocabulary: no plain sum can exceed it.
    """

    num_heads: int
    num_ranks: int
    plain: list[list[float]]
    conditional: list[list[float]]
    coverage: list[float]
    positions: int
    source: str


@dataclass(frozen=True)
class PathCounts:
    """For each rank path, at how many of `positions` places all of its guesses were right.

    Only places where every head is asked count, so that the end of a text doesn't make deep paths look bad.
    """

    positions: int
    counts: Counter[TreePath]

    def probability(self, path: TreePath) -> float:
        """How often the whole path is right; 1 for the empty path."""
        return self.counts[path] / self.positions if path else 1.0


@dataclass(frozen=True)
class Measurement:
    """Everything measured on one held-out text."""

    ranks: Ranks
    accuracy: Accuracy
    paths: PathCounts

    def save(self, folder: Path, step_cost: Mapping[int, float]) -> None:
        """Write accuracy.json, with the most frequent paths and the seconds of a step by nodes, for inspect-tree.

        The old file or the new one is there at any moment. Raises TrainingError.
        """
        content = asdict(self.accuracy)
        content["path_positions"] = self.paths.positions
        content["paths"] = [[list(path), count] for path, count in _by_count(self.paths.counts)[:_SAVED_PATHS]]
        content["step_cost"] = dict(step_cost)
        try:
            write_atomically(folder / "accuracy.json", json.dumps(content) + "\n")
        except OSError as error:
            raise TrainingError(
                f"can't write {folder / 'accuracy.json'}: {error}", "free some space and run the same command again"
            ) from error


def measure(
    heads: Heads,
    examples: Examples,
    *,
    num_ranks: int,
    chunk: int,
    source: str,
    on_batch: Callable[[int, int], None] = lambda done, total: None,
) -> Measurement:
    """All measurements of the heads on these examples.

    num_ranks  ranks told apart, at most W; chunk: (place, head) pairs projected at once; source: what the text is
    on_batch   told how many batches of places are done, of how many

    Raises TrainingError when no place can be measured.
    """
    ranks = rank_places(heads, examples, num_ranks=num_ranks, chunk=chunk, on_batch=on_batch)
    return Measurement(ranks, accuracy_of(ranks, examples, source), path_frequencies(ranks))


def chain_accuracy(right_NK: NDArray[np.bool_], examples: Examples, rows_N: NDArray[np.int64]) -> list[float]:
    """Per head, how often its best guess is right where those of all before were: rank 0 of `Accuracy.conditional`.

    right_NK   whether each head's best guess is right at these rows of the examples; 0 where no place qualifies
    """
    asked_NK = examples.labels_NK[rows_N] != NOT_ASKED
    before_N = examples.corpus.supervised_T[examples.places_N[rows_N] + 1] & asked_NK[:, 0]
    shares = []
    for right_N, asked_N in zip(right_NK.T, asked_NK.T, strict=True):
        before_N = before_N & asked_N
        shares.append(float((right_N & before_N).sum() / max(before_N.sum(), 1)))
        before_N = before_N & right_N
    return shares


def rank_places(
    heads: Heads,
    examples: Examples,
    *,
    num_ranks: int,
    chunk: int,
    on_batch: Callable[[int, int], None] = lambda done, total: None,
) -> Ranks:
    """The true tokens' ranks at every place where decoding could stand: the next token is the target's own."""
    stands_N = examples.corpus.supervised_T[examples.places_N + 1] & (examples.labels_NK[:, 0] != NOT_ASKED)
    if not stands_N.any():
        raise TrainingError("the held-out text has no place to measure", "keep more samples (data.held_out)")
    rows = np.flatnonzero(stands_N)
    num_ranks = min(num_ranks, heads.config.draft_vocab)
    starts, parts = range(0, len(rows), _BATCH), []
    for number, start in enumerate(starts, start=1):
        parts.append(_rank_batch(heads, examples, rows[start : start + _BATCH], num_ranks, chunk))
        on_batch(number, len(starts))
    return Ranks(examples.places_N[rows], np.concatenate(parts), num_ranks)


def accuracy_of(ranks: Ranks, examples: Examples, source: str) -> Accuracy:
    """Plain and conditional accuracies; a row of zeros where no place qualifies."""
    plain, conditional, coverage = [], [], []
    right_before_N = np.ones(len(ranks.ranks_NK), np.bool_)
    label_NK = examples.labels_NK[examples.rows_at(ranks.places_N)]
    for head in range(ranks.ranks_NK.shape[1]):
        rank_N = ranks.ranks_NK[:, head]
        asked_N = rank_N != NOT_ASKED
        plain.append(_shares(rank_N[asked_N], ranks.num_ranks))
        conditional.append(_shares(rank_N[asked_N & right_before_N], ranks.num_ranks))
        coverage.append(float((label_NK[asked_N, head] >= 0).sum() / max(asked_N.sum(), 1)))
        right_before_N &= rank_N == 0
    return Accuracy(
        num_heads=len(plain),
        num_ranks=ranks.num_ranks,
        plain=plain,
        conditional=conditional,
        coverage=coverage,
        positions=len(ranks.ranks_NK),
        source=source,
    )


def path_frequencies(ranks: Ranks) -> PathCounts:
    """How often each path is right, from the tuples of ranks at each place, cut at the first miss."""
    asked_NK = ranks.ranks_NK[(ranks.ranks_NK != NOT_ASKED).all(axis=1)]
    tuples, repeats = np.unique(asked_NK, axis=0, return_counts=True)
    counts: Counter[TreePath] = Counter()
    for rank_tuple, repeat in zip(tuples.tolist(), repeats.tolist(), strict=True):
        for depth, rank in enumerate(rank_tuple, start=1):
            if rank >= ranks.num_ranks:
                break
            counts[tuple(rank_tuple[:depth])] += repeat
    return PathCounts(len(asked_NK), counts)


def fit_tree_joint(paths: PathCounts, size: int) -> list[TreePath]:
    """The `size` paths that are right most often, fewer when fewer were ever right: the best tree on these places.

    A path is never right more often than its prefix, so the most frequent paths always make a tree; the expected
    tokens a step are 1 plus the sum of their probabilities.
    """
    return [path for path, _ in _by_count(paths.counts)[:size]]


def _rank_batch(
    heads: Heads, examples: Examples, rows_B: NDArray[np.int64], num_ranks: int, chunk: int
) -> NDArray[np.int16]:
    """ranks [B, K] of one batch. Asked for only while every token before is the target's own as well."""
    labels_BK = examples.labels_NK[rows_B]
    asked_BK = np.logical_and.accumulate(labels_BK != NOT_ASKED, axis=1)
    ranks_BK = np.where(asked_BK, num_ranks, NOT_ASKED).astype(np.int16)
    device = heads.device
    with torch.no_grad():
        blocks_BKH = heads.block_forward(examples.inputs(heads, rows_B, device, heads.dtype))
        for head in range(labels_BK.shape[1]):
            projection = heads.projection(head)
            inside = np.flatnonzero(asked_BK[:, head] & (labels_BK[:, head] >= 0))
            for start in range(0, len(inside), chunk):
                at = inside[start : start + chunk]
                logits_CW = projection.logits(blocks_BKH[torch.from_numpy(at).to(device), head])
                # topk rather than counting larger logits: ties fall as they do for a drafter
                guesses_CR = logits_CW.topk(num_ranks, dim=1).indices.cpu().numpy()
                hit_CR = guesses_CR == labels_BK[at, head][:, None]
                ranks_BK[at, head] = np.where(hit_CR.any(axis=1), hit_CR.argmax(axis=1), num_ranks)
    return ranks_BK


def _shares(rank_N: NDArray[np.int16], num_ranks: int) -> list[float]:
    """The share of each rank, misses counted in the whole."""
    counts_R = np.bincount(rank_N, minlength=num_ranks + 1)[:num_ranks]
    return [float(count) / max(len(rank_N), 1) for count in counts_R]


def _by_count(counts: Counter[TreePath]) -> list[tuple[TreePath, int]]:
    """Paths, the most frequent first; among equals the shorter first, so that parents precede their children."""
    return sorted(counts.items(), key=lambda item: (-item[1], len(item[0]), item[0]))
