"""Candidate generator: the likeliest paths of a cheaper model, as a trie of so many nodes."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Union

from medusa_cli.reference.trie import Trie

Model = Callable[[Sequence[Hashable]], Mapping[Hashable, float]]
Guesses = Union[Trie, Iterable[Iterable[Hashable]]]
Drafter = Callable[[Sequence[Hashable]], Guesses]


class DraftModel:
    """Drafts with any callable from tokens to probabilities.

    size    nodes under the root at most: what the big model is asked beside the text itself
    depth   guesses one after the other at most
    width   guesses for the same place at most
    """

    def __init__(self, model: Model, size: int = 8, depth: int = 4, width: int = 2) -> None:
        if min(size, depth, width) < 0:
            raise ValueError("size, depth and width can't be negative")
        self.model, self.size, self.depth, self.width = model, size, depth, width

    def __call__(self, text: Sequence[Hashable]) -> Trie:
        """Best first: the node that is added next is the likeliest of all that could be.

        A path's chance is the product along it, so a node's parent is always there before it.
        """
        trie, order = Trie(), itertools.count()  # the order breaks ties: tokens need not compare
        waiting: list[tuple[float, int, int, Hashable]] = []
        node = 0
        while trie.num_guesses < self.size:
            path = trie.path(node)
            found = checked(self.model([*text, *path])) if len(path) < self.depth else {}
            for token, chance in heapq.nlargest(self.width, found.items(), key=lambda item: item[1]):
                share = trie.chances[node] * chance / sum(found.values())
                heapq.heappush(waiting, (-share, next(order), node, token))
            if not waiting:
                break
            share, _, parent, token = heapq.heappop(waiting)
            node = trie.add(parent, token, -share)
        return trie


def checked(found: Mapping[Hashable, float]) -> Mapping[Hashable, float]:
    """What a model gave. Raises ValueError for what are no probabilities; they need not sum to 1."""
    if not isinstance(found, Mapping):
        raise ValueError(f"the model gave {type(found).__name__}, not probabilities by token")
    for token, probability in found.items():
        if not (isinstance(probability, (int, float)) and 0 <= probability < math.inf):
            raise ValueError(f"the model gave {probability!r} as the probability of {token!r}")
    if not sum(found.values()) > 0:
        raise ValueError("the model knows no next token")
    return found


def as_trie(guesses: Guesses) -> Trie:
    """What a drafter returned, as a trie: a trie as it is, or paths of tokens merged where they begin alike."""
    if isinstance(guesses, Trie):
        return guesses
    trie = Trie()
    for path in guesses:
        trie.add_path(path)
    return trie
