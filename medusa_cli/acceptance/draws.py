"""Tokens drawn with uniform numbers: each row has a stream of its own, so its text doesn't depend on the rows beside.

Shape letters: B rows, M distributions, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_cli.contracts import Uniform

# Rows of one run have seeds of their own; runs with the next seed must not share them.
_STRIDE = 1_000_003


def stream_of(seed: int, key: int) -> torch.Generator:
    """The random numbers of the text with this key in a run with this seed: the same on every device."""
    return torch.Generator().manual_seed((seed * _STRIDE + key) % 2**63)


def uniform_of(streams: Sequence[torch.Generator], device: torch.device) -> Uniform:
    """Numbers for these rows, each from its own stream."""

    def uniform(num_rows: int, count: int) -> Tensor:
        assert num_rows == len(streams)
        return torch.stack([torch.rand(count, dtype=torch.float64, generator=one) for one in streams]).to(device)

    return uniform


def draw(p_MV: Tensor, uniform_M: Tensor) -> Tensor:
    """A token of each distribution, which need not sum to 1: where the running sum passes its share of the total."""
    mass_MV = p_MV.double().cumsum(-1)
    place_M1 = torch.searchsorted(mass_MV, (uniform_M * mass_MV[:, -1])[:, None], right=True)
    # a share that rounds up to the total would point past the last token that has a chance
    last_M = p_MV.shape[-1] - 1 - (p_MV.flip(-1) > 0).int().argmax(-1)
    return torch.minimum(place_M1[:, 0], last_M)
