"""Examples of heads that see inner states of the target at every place of a text before their own.

The states are those that were stored, or those of the target run again, which is handed in: it is not known here.
Shape letters: N examples, B examples drawn, K heads, S texts, T places of a text, L tapped layers, X taps times width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from medusa_cli.contracts import DraftHeads
from medusa_cli.heads.block import BlockInputs, padded
from medusa_cli.heads.block_attention import Blocks
from medusa_cli.heads.config import HeadsConfig
from medusa_cli.train.corpus import Corpus, Examples
from medusa_cli.train.order import TextOrder

Reader = Callable[[Sequence[Sequence[int]]], Tensor]
"""Texts -> inner states [S, T, X] at their tokens, whatever stands behind each one's end."""


@dataclass(frozen=True)
class TextExamples(Examples):
    """Examples with the texts they stand in; those of one text are learnt from together, for it is looked at once.

    reader   the target run again; None: states are stored
    """

    reader: Reader | None = None

    def inputs(self, heads: DraftHeads, rows_B: NDArray[np.int64], device: torch.device, dtype: torch.dtype) -> Any:
        """The texts as far as they are seen, where each example stands, and its tokens."""
        places_B = self.places_N[rows_B]
        samples_S, text_B = np.unique(self.corpus.sample_of(places_B), return_inverse=True)
        within_B = places_B - self.corpus.offsets_S[samples_S][text_B]
        lengths_S = np.zeros(len(samples_S), np.int64)
        np.maximum.at(lengths_S, text_B, within_B + 1)
        if len(rows_B):
            states_STX = self._states(samples_S, lengths_S).to(device=device, dtype=dtype)
        else:  # the share of a process that has nothing to do
            states_STX = torch.zeros(0, 1, heads.config.states_width, device=device, dtype=dtype)
        blocks = Blocks.of(torch.from_numpy(text_B).to(device), torch.from_numpy(within_B).to(device))
        return BlockInputs(states_STX, blocks, self.paths(rows_B, device))

    def order(self, batch_size: int, seed: int, share: float) -> TextOrder:
        """Text by text."""
        return TextOrder(self.corpus.sample_of(self.places_N), batch_size, seed, share)

    def _states(self, samples_S: NDArray[np.int64], lengths_S: NDArray[np.int64]) -> Tensor:
        """States of the beginnings of these texts [S, T, X]."""
        starts_S = self.corpus.offsets_S[samples_S]
        ranges = [slice(start, start + length) for start, length in zip(starts_S, lengths_S, strict=True)]
        if self.reader is not None:
            return self.reader([self.corpus.ids_T[each].tolist() for each in ranges])
        assert self.corpus.taps_TX is not None
        return padded([torch.from_numpy(np.array(self.corpus.taps_TX[each])) for each in ranges])


def examples_of(
    corpus: Corpus, samples: Sequence[int], draft_ids_W: Tensor, config: HeadsConfig, reader: Reader | None = None
) -> Examples:
    """What heads of this config are asked in these samples. Raises TrainingError as `Examples.of`."""
    if not config.looks_back:
        return Examples.of(corpus, samples, draft_ids_W, config.num_heads)
    found = Examples.of(corpus, samples, draft_ids_W, config.num_heads)
    return TextExamples(found.corpus, found.places_N, found.labels_NK, reader)


def evened(taps_TLX: Tensor) -> Tensor:
    """States of inner layers [..., L, X] each brought to a mean square of 1, end to end [..., L * X].

    So 16 bits hold them: in some models a few numbers are a thousand times as large as others.
    """
    return F.rms_norm(taps_TLX.float(), taps_TLX.shape[-1:]).flatten(-2)
