"""Tokens drawn with uniform numbers that belong to a text's places, not to the steps in which they are decided.

Token i of a text is drawn with number i of the text's own stream. A node of depth d would decide the token d places
further on, so all nodes of a depth share a number: only one of them is ever on the path. The draws along a path stay
independent, and a number read for a path that lost has decided nothing, so it is still fresh when its place is
reached. That keeps the law of the text, and gives more: with the same seed, a sampled text is the same under any tree,
under none, and beside any other rows.
Shape letters: B rows, N tree nodes, D places on a path, M distributions, V vocabulary.
"""

from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor

from medusa_cli.contracts import Uniform
from medusa_cli.trees.tree import TokenTree


class Stream:
    """The random numbers of the text with this key in a run with this seed: the same on every device."""

    def __init__(self, seed: int = 0, key: int = 0) -> None:
        # Seeded by words, of which every character counts: torch's generator looks at 32 bits of a number.
        self._source = Random(f"text {key} of seed {seed}")
        self._numbers: list[float] = []

    def numbers(self, place: int, count: int) -> list[float]:
        """Numbers in [0, 1) for this many tokens of the text, from this place on."""
        missing = place + count - len(self._numbers)
        if missing > 0:
            self._numbers += [self._source.random() for _ in range(missing)]
        return self._numbers[place : place + count]


def uniform_of(streams: Sequence[Stream], places: Sequence[int], device: torch.device) -> Uniform:
    """Numbers for these rows, whose next tokens have these places in their texts."""

    def uniform(count: int) -> Tensor:
        numbers = [stream.numbers(place, count) for stream, place in zip(streams, places, strict=True)]
        return torch.tensor(numbers, dtype=torch.float64).to(device)

    return uniform


def at_nodes(uniform: Uniform, tree: TokenTree) -> Tensor:
    """Each node's number [B, N]: the one of the place that the token after it would have."""
    uniform_BD = uniform(tree.max_depth + 1)
    return uniform_BD.gather(1, tree.depths_XN.expand(len(uniform_BD), -1))


def draw(p_MV: Tensor, uniform_M: Tensor) -> Tensor:
    """A token of each distribution, which need not sum to 1: where the running sum passes its share of the total."""
    mass_MV = p_MV.double().cumsum(-1)
    place_M1 = torch.searchsorted(mass_MV, (uniform_M * mass_MV[:, -1])[:, None], right=True)
    # a share that rounds up to the total would point past the last token that has a chance
    last_M = p_MV.shape[-1] - 1 - (p_MV.flip(-1) > 0).int().argmax(-1)
    return torch.minimum(place_M1[:, 0], last_M)
