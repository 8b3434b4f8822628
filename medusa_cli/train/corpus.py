"""The training set: the target's hidden states, its tokens and which of them are asked for, computed once.

`Corpus` holds samples in memory, or reads a folder of train/store.py memory-mapped; `Examples` says what each head is
asked at each place. This file knows no model and no heads.

Shape letters: T places of all samples end to end, N places that ask something, B rows drawn, K heads, H hidden,
V vocabulary, W draft vocabulary, S samples.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medusa_cli.contracts import DraftHeads
from medusa_cli.errors import TrainingError
from medusa_cli.train.order import Order
from medusa_cli.train.store import DATA, TAPS, Sample, as_float16, check_sums, read_index, read_store

NOT_ASKED = -1
"""The label where head k's token is past the sample's end or not supervised."""
OUTSIDE = -2
"""The label where head k's token is supervised, but not in the draft vocabulary."""


@dataclass(frozen=True)
class Corpus:
    """All samples end to end, in memory or memory-mapped.

    hidden_TH float16, ids_T int32, supervised_T bool, offsets_S int64 with S+1 entries: sample s is the places
    offsets[s] to offsets[s+1]. taps_TX float16: inner states of whole texts, where these are stored.
    """

    hidden_TH: NDArray[np.float16]
    ids_T: NDArray[np.int32]
    supervised_T: NDArray[np.bool_]
    offsets_S: NDArray[np.int64]
    keys: list[str]
    taps_TX: NDArray[np.float16] | None = None

    @classmethod
    def open(cls, folder: Path) -> "Corpus":
        """The complete samples of a `HiddenStore` folder, memory-mapped.

        Raises TrainingError when there are none, or when one is not as it was written.
        """
        if not (folder / "store.json").is_file():
            raise TrainingError(f"no hidden states in {folder}", "run the data stage first")
        store = read_store(folder)
        hidden_size, tap_width = int(store["hidden_size"]), int(store.get("tap_width", 0))
        index = read_index(folder, hidden_size, tap_width)
        total = sum(line["length"] for line in index)
        if not total:
            raise TrainingError(f"{folder} holds no complete sample", "run the data stage again")
        hidden, ids, supervised = (
            np.memmap(folder / name, dtype, "r", shape=(total, hidden_size) if name == "hidden.f16" else (total,))
            for name, dtype in DATA.items()
        )
        taps = np.memmap(folder / TAPS, np.float16, "r", shape=(total, tap_width)) if tap_width else None
        check_sums(folder, index, [hidden, ids, supervised, *([] if taps is None else [taps])])
        return cls(
            hidden_TH=hidden,
            ids_T=ids,
            supervised_T=np.asarray(supervised).astype(np.bool_),
            offsets_S=_offsets(line["length"] for line in index),
            keys=[line["key"] for line in index],
            taps_TX=taps,
        )

    @classmethod
    def from_samples(cls, samples: Sequence[Sample]) -> "Corpus":
        """The samples in memory. Raises TrainingError when a hidden state is no finite float16."""
        assert samples, "a corpus needs a sample"
        hidden_size = samples[0].hidden.shape[1]
        taps = [as_float16(one, one.taps, one.taps.shape[1]) for one in samples if one.taps is not None]
        return cls(
            hidden_TH=np.concatenate([as_float16(sample, sample.hidden, hidden_size) for sample in samples]),
            ids_T=np.concatenate([np.asarray(sample.ids, np.int32) for sample in samples]),
            supervised_T=np.concatenate([np.asarray(sample.supervised, np.bool_) for sample in samples]),
            offsets_S=_offsets(len(sample.ids) for sample in samples),
            keys=[sample.key for sample in samples],
            taps_TX=np.concatenate(taps) if taps else None,
        )

    @property
    def num_samples(self) -> int:
        """S."""
        return len(self.keys)

    def sample_of(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The index of the sample each place is in."""
        return np.searchsorted(self.offsets_S, places, side="right") - 1

    def learnt_tokens(self, sample: int) -> int:
        """How many of a sample's tokens are supervised."""
        return int(self.supervised_T[self.offsets_S[sample] : self.offsets_S[sample + 1]].sum())

    def by_key(self) -> list[int]:
        """All samples, sorted by their keys: an order that doesn't depend on which was finished first."""
        return sorted(range(self.num_samples), key=lambda sample: (len(self.keys[sample]), self.keys[sample]))

    def split(self, held_out: float, seed: int, order: Sequence[int] | None = None) -> "Split":
        """Samples for training and samples kept for measuring; equal texts always fall on the same side.

        held_out  share of the different texts that is kept, at least one
        order     all samples in the order to go by, on both sides; None: as they are stored

        Raises TrainingError when all texts are equal.
        """
        places = range(self.num_samples) if order is None else order
        rank = {sample: place for place, sample in enumerate(places)}
        groups: dict[bytes, list[int]] = {}
        for sample in places:
            start, end = self.offsets_S[sample : sample + 2]
            groups.setdefault(self.ids_T[start:end].tobytes(), []).append(sample)
        texts = list(groups.values())
        if len(texts) < 2:
            raise TrainingError("one text can't both train and measure", "use more samples (--num-samples)")
        drawn = np.random.default_rng(seed).permutation(len(texts))
        num_held = min(max(1, round(held_out * len(texts))), len(texts) - 1)
        return Split(
            train=sorted((sample for text in drawn[num_held:] for sample in texts[text]), key=rank.__getitem__),
            held_out=sorted((sample for text in drawn[:num_held] for sample in texts[text]), key=rank.__getitem__),
        )


@dataclass(frozen=True)
class Split:
    """Sample indices for training and for measuring."""

    train: list[int]
    held_out: list[int]


@dataclass(frozen=True)
class Examples:
    """What the heads are asked: places_N of a corpus and labels_NK, draft-vocabulary indices or a code above.

    Head k at place t is asked for the token at t+k+2 of the same sample, if that token is supervised. Places where
    no head is asked anything are left out.
    """

    corpus: Corpus
    places_N: NDArray[np.int64]
    labels_NK: NDArray[np.int32]

    @classmethod
    def of(cls, corpus: Corpus, samples: Sequence[int], draft_ids_W: Tensor, num_heads: int) -> Self:
        """The examples of these samples. Raises TrainingError when nothing in them is supervised."""
        index_V = draft_index(draft_ids_W, int(corpus.ids_T.max()) + 1)
        places, labels = [], []
        for sample in samples:
            start, end = int(corpus.offsets_S[sample]), int(corpus.offsets_S[sample + 1])
            label_TK = _labels(corpus.ids_T[start:end], corpus.supervised_T[start:end], index_V, num_heads)
            asks_T = (label_TK != NOT_ASKED).any(axis=1)
            places.append(start + np.flatnonzero(asks_T))
            labels.append(label_TK[asks_T])
        if not any(len(part) for part in places):
            raise TrainingError(
                f"none of {len(samples)} samples holds a supervised token two or more places in",
                "check the loss masks (--preview-masks) and --max-seq-length",
            )
        return cls(corpus, np.concatenate(places).astype(np.int64), np.concatenate(labels))

    def __len__(self) -> int:
        return len(self.places_N)

    @property
    def num_heads(self) -> int:
        """K."""
        return int(self.labels_NK.shape[1])

    def rows_at(self, places_M: NDArray[np.int64]) -> NDArray[np.int64]:
        """The examples at these places, each of which has one; places are in the order of the samples given to `of`."""
        order_N = np.argsort(self.places_N)
        return order_N[np.searchsorted(self.places_N, places_M, sorter=order_N)]

    def hidden(self, rows_B: NDArray[np.int64], device: torch.device | str = "cpu") -> Tensor:
        """hidden [B, H] float32 of these examples."""
        hidden_BH = torch.from_numpy(np.asarray(self.corpus.hidden_TH[self.places_N[rows_B]]))
        return hidden_BH.to(device).float()

    def inputs(self, heads: DraftHeads, rows_B: NDArray[np.int64], device: torch.device, dtype: torch.dtype) -> Any:
        """What heads see at these examples."""
        return heads.inputs(self.hidden(rows_B, device).to(dtype), self.paths(rows_B, device))

    def order(self, batch_size: int, seed: int, share: float) -> Order:
        """Which of them each step learns from."""
        return Order(len(self), batch_size, seed, share)

    def decided(self, rows_B: NDArray[np.int64], device: torch.device | str = "cpu") -> Tensor:
        """The target's hidden states [B, K, H] float32 that decided what each head is asked for."""
        places_BK = self.places_N[rows_B][:, None] + 1 + np.arange(self.num_heads)
        hidden_BKH = self.corpus.hidden_TH[np.minimum(places_BK, len(self.corpus.ids_T) - 1)]
        return torch.from_numpy(hidden_BKH).to(device).float()

    def paths(self, rows_B: NDArray[np.int64], device: torch.device | str = "cpu") -> Tensor:
        """The ids [B, K] int64 from the root on, which the hidden state decided: what the last head would see.

        Past the corpus's end the last id is repeated; no head that sees those is asked anything.
        """
        return self._ids(rows_B, 1).to(device)

    def following(self, rows_B: NDArray[np.int64]) -> Tensor:
        """The ids [B, K] int64 that come after the root: what the heads are asked for. As above past the end."""
        return self._ids(rows_B, 2)

    def _ids(self, rows_B: NDArray[np.int64], first: int) -> Tensor:
        """The K ids from `first` places after each example's on."""
        places_BK = self.places_N[rows_B][:, None] + first + np.arange(self.num_heads)
        return torch.from_numpy(self.corpus.ids_T[np.minimum(places_BK, len(self.corpus.ids_T) - 1)]).long()

    def labels(self, rows_B: NDArray[np.int64], device: torch.device | str = "cpu") -> Tensor:
        """labels [B, K] int64 of these examples."""
        return torch.from_numpy(self.labels_NK[rows_B]).to(device).long()

    def counts(self, rows_B: NDArray[np.int64]) -> Tensor:
        """Per head, how many of these examples ask for a token of the draft vocabulary: [K] int64."""
        return torch.from_numpy((self.labels_NK[rows_B] >= 0).sum(axis=0))

    def names(self, rows_B: NDArray[np.int64]) -> list[str]:
        """The keys of the samples these examples come from, each once, in order."""
        samples = self.corpus.sample_of(self.places_N[rows_B])
        return [self.corpus.keys[sample] for sample in dict.fromkeys(samples.tolist())]

    def coverage(self) -> list[float]:
        """Per head, the share of the tokens asked for that are in the draft vocabulary; 0 when none is asked for."""
        asked_K = (self.labels_NK != NOT_ASKED).sum(axis=0)
        inside_K = (self.labels_NK >= 0).sum(axis=0)
        return [float(inside) / float(max(asked, 1)) for inside, asked in zip(inside_K, asked_K, strict=True)]


def choose_draft_ids(corpus: Corpus, samples: Sequence[int], *, size: int, real_vocab: int) -> Tensor:
    """The `size` most frequent supervised tokens of these samples, ascending: draft_ids [W] int64.

    size 0, or one of `real_vocab` and more, takes all real ids. Ids from `real_vocab` on are padding rows of the
    output matrix and are never chosen. Tokens not seen fill up from the lowest id.
    """
    if size == 0 or size >= real_vocab:
        return torch.arange(real_vocab)
    counts_V = np.zeros(real_vocab, np.int64)
    for sample in samples:
        place = slice(int(corpus.offsets_S[sample]), int(corpus.offsets_S[sample + 1]))
        ids = corpus.ids_T[place][corpus.supervised_T[place]]
        counts_V += np.bincount(ids[ids < real_vocab], minlength=real_vocab)
    most_frequent = np.argsort(-counts_V, kind="stable")[:size]
    return torch.from_numpy(np.sort(most_frequent))


def draft_index(draft_ids_W: Tensor, vocab_size: int) -> NDArray[np.int32]:
    """index [V] from a target id to its place in the draft vocabulary, OUTSIDE where it has none."""
    ids = draft_ids_W.cpu().numpy()
    index_V = np.full(max(vocab_size, int(ids.max()) + 1), OUTSIDE, np.int32)
    index_V[ids] = np.arange(len(ids), dtype=np.int32)
    return index_V


def some_of(names: Sequence[str]) -> str:
    """The first five names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _labels(
    ids_T: NDArray[np.int32], supervised_T: NDArray[np.bool_], index_V: NDArray[np.int32], num_heads: int
) -> NDArray[np.int32]:
    """What each head is asked at each place of one sample, as draft indices or codes."""
    labels_TK = np.full((len(ids_T), num_heads), NOT_ASKED, np.int32)
    wanted_T = np.where(supervised_T, index_V[ids_T], NOT_ASKED)
    for head in range(num_heads):
        later = wanted_T[head + 2 :]
        labels_TK[: len(later), head] = later
    return labels_TK


def _offsets(lengths: Iterable[int]) -> NDArray[np.int64]:
    """Where each sample starts, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(np.fromiter(lengths, np.int64))]).astype(np.int64)
