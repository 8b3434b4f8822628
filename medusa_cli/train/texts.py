"""Whole texts of a corpus, to be read anew: token ids with their prompts, and where in them something is learnt.

The stored hidden states are the target's own; an adapted target must read the texts again. Shape letters: B texts,
T positions, N places of examples, P places that predict a learnt token, K heads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medusa_cli.train.corpus import Corpus, Examples


@dataclass(frozen=True)
class Reading:
    """Some texts side by side, right-padded: ids_BT, of so many `lengths`.

    rows_N      examples in them, as `Examples` counts; asked_N: where these are in ids_BT, flattened
    learnt_P    where in ids_BT, flattened, the next token is one that is learnt
    text_P, text_N   the text (0 to B - 1) that each place is in
    """

    ids_BT: Tensor
    lengths: list[int]
    rows_N: NDArray[np.int64]
    asked_N: Tensor
    text_N: Tensor
    learnt_P: Tensor
    text_P: Tensor


@dataclass(frozen=True)
class Texts:
    """The samples of `examples` that ask something, each as the whole text it was taken from.

    prompts   the whole prompt's ids by key, for samples that begin with their prompt's last token; where some are
              known, samples without one are left out: they can't be read as the target did
    """

    examples: Examples
    prompts: Mapping[str, Sequence[int]]

    @property
    def samples(self) -> list[int]:
        """Indices of the samples, in the order of the examples."""
        keys = self.examples.corpus.keys
        return [sample for sample in self._rows if not self.prompts or keys[sample] in self.prompts]

    @cached_property
    def _rows(self) -> dict[int, slice]:
        """Which examples each sample has: neighbours, in the order of its places."""
        sample_N = self.examples.corpus.sample_of(self.examples.places_N)
        starts = [0, *(np.flatnonzero(np.diff(sample_N)) + 1).tolist(), len(sample_N)]
        return {int(sample_N[first]): slice(first, end) for first, end in pairwise(starts)}

    def names(self, samples: Sequence[int]) -> list[str]:
        """The keys of these samples."""
        return [self.examples.corpus.keys[sample] for sample in samples]

    def read(self, samples: Sequence[int]) -> Reading:
        """These samples side by side."""
        corpus, examples = self.examples.corpus, self.examples
        texts = [whole_text(corpus, sample, self.prompts) for sample in samples]
        width = max(map(len, texts))
        ids_BT = torch.zeros(len(texts), width, dtype=torch.long)
        rows, asked, learnt = [], [], []
        for row, (sample, ids) in enumerate(zip(samples, texts, strict=True)):
            ids_BT[row, : len(ids)] = torch.tensor(ids)
            start, end = int(corpus.offsets_S[sample]), int(corpus.offsets_S[sample + 1])
            # a place of the corpus is this much further on in ids_BT, flattened
            shift = row * width + len(ids) - end
            mine = self._rows[sample]
            rows.append(np.arange(mine.start, mine.stop))
            asked.append(examples.places_N[mine] + shift)
            learnt.append(np.flatnonzero(corpus.supervised_T[start + 1 : end]) + start + shift)
        return Reading(
            ids_BT=ids_BT,
            lengths=[len(ids) for ids in texts],
            rows_N=np.concatenate(rows),
            asked_N=torch.from_numpy(np.concatenate(asked)),
            text_N=_text_of(asked),
            learnt_P=torch.from_numpy(np.concatenate(learnt)),
            text_P=_text_of(learnt),
        )


def whole_text(corpus: Corpus, sample: int, prompts: Mapping[str, Sequence[int]]) -> list[int]:
    """A sample's ids, with what comes before it in its text."""
    ids: list[int] = corpus.ids_T[int(corpus.offsets_S[sample]) : int(corpus.offsets_S[sample + 1])].tolist()
    prompt = list(prompts.get(corpus.keys[sample], ids[:1]))
    assert prompt[-1] == ids[0], f"sample {corpus.keys[sample]} begins with its prompt's last token"
    return prompt[:-1] + ids


def _text_of(places: Sequence[NDArray[np.int64]]) -> Tensor:
    """The text each place is in, text by text."""
    return torch.repeat_interleave(torch.tensor([len(each) for each in places]))
