"""Acceptance: a guess becomes text if it is what the model itself would have written there, and only then.

Each place of the text has one token that plain decoding writes there: the likeliest one, or one drawn with a random
number that belongs to the place. A guess that is this token is right. So guesses decide how many tokens a step brings
and never which: a guess of probability p is accepted with chance p, and the text's distribution is the model's.
(Leviathan et al. 2023, arXiv 2211.17192, section 2.3: min(1, p/q), where q = 1.)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping, Sequence

from medusa_cli.reference.trie import Trie

Rule = Callable[[Mapping[Hashable, float], int], Hashable]


class Greedy:
    """The likeliest token; of equals the first."""

    def __call__(self, probabilities: Mapping[Hashable, float], place: int) -> Hashable:
        """The token at a place of the text."""
        return max(probabilities, key=lambda token: probabilities[token])


class Sampling:
    """A token drawn from the probabilities: the first in a race where each takes its own number over its probability.

    Numbers are exponential ones, so a token comes first with the chance that it has (the Gumbel-max trick, Maddison et
    al. 2014, arXiv 1411.0030).

    number   of a token at a place, above 0; None: of Python's generator, by seed, place and token
    """

    def __init__(self, seed: int = 0, number: Callable[[int, Hashable], float] | None = None) -> None:
        self._number = number or (lambda place, token: random.Random(f"{seed} {place} {token!r}").expovariate(1))

    def __call__(self, probabilities: Mapping[Hashable, float], place: int) -> Hashable:
        """The token at a place of the text."""
        possible = [token for token, probability in probabilities.items() if probability > 0]
        return min(possible, key=lambda token: self._number(place, token) / probabilities[token])


def accept(
    trie: Trie, probabilities: Sequence[Mapping[Hashable, float]], rule: Rule, place: int
) -> tuple[list[int], list[Hashable]]:
    """The nodes of the path that is right, and the tokens that the step brings: those guesses and one bonus token.

    probabilities   by node, as the verifier gives them
    place           of the first new token in the text
    """
    nodes, tokens = [], [rule(probabilities[0], place)]
    node: int | None = trie.children[0].get(tokens[-1])
    while node is not None:
        nodes.append(node)
        tokens.append(rule(probabilities[node], place + len(nodes)))
        node = trie.children[node].get(tokens[-1])
    return nodes, tokens
