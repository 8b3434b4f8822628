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


def draw(p_MV: Tensor, uniform_M: Tensor, ids_MV: Tensor | None = None) -> Tensor:
    """A token of each distribution, which need not sum to 1: the one that comes first in a race, as column.

    Token v takes the time E_v / p_v, where E_v are exponential numbers made of the distribution's own number and the
    token's id; the first to come is v with chance p_v (the exponential race, or Gumbel-max trick: Maddison et al. 2014,
    arXiv 1411.0030). Two tokens come at nearly the same time about as seldom as their logits are nearly equal in greedy
    decoding, so rounding hardly ever changes a text. A running sum over the vocabulary would: its last digits
    are larger than the chance of most tokens.

    ids_MV   of the columns, where these aren't all ids in order
    """
    if ids_MV is None:
        number_U, which_M = uniform_M.unique(return_inverse=True)  # nodes of one depth share a number
        ids_1V = torch.arange(p_MV.shape[-1], device=p_MV.device)[None]
        race_MV = _exponential(number_U, ids_1V)[which_M]
    else:
        race_MV = _exponential(uniform_M, ids_MV)
    return race_MV.div_(p_MV).argmin(-1)


def _exponential(uniform_U: Tensor, ids_UV: Tensor) -> Tensor:
    """An exponential number for each id [U, V], float32: the same for the same pair, on every device."""
    mixed_UV = (uniform_U * 2**53).long()[:, None] + ids_UV * _GOLDEN
    for shift, factor in _MIXES:  # the finalizer of SplitMix64 (Steele, Lea, Flood 2014); products wrap
        mixed_UV = (mixed_UV ^ _shifted(mixed_UV, shift)) * factor
    mixed_UV ^= _shifted(mixed_UV, 31)
    # from above 0 to below 1; the smallest numbers win races, so they need all their digits
    share_UV = ((_shifted(mixed_UV, 11).double() + 0.5) * 2.0**-53).float().clamp_(max=1 - 2.0**-24)
    return share_UV.neg_().log1p_().neg_()


def _shifted(number: Tensor, by: int) -> Tensor:
    """To the right, as a number without a sign."""
    return (number >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIXES = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)))
