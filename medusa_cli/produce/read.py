"""Hidden states of text that is there already: the target reads it, right-padded, and remembers what it has read."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from medusa_cli.data.tokens import Tokens
from medusa_cli.target.model import Target
from medusa_cli.train.store import HiddenStore, Sample

READ_TOKENS = 4096  # tokens of one forward


def read_samples(
    target: Target, samples: Mapping[str, Tokens], folder: Path, on_progress: Callable[[int, int, int], None]
) -> None:
    """Hidden states of every sample that has none yet, by key; longest first, so that a batch wastes little.

    Raises TargetError before the first forward when a token has no embedding.
    """
    target.check_ids(sample.ids for sample in samples.values())
    with HiddenStore(folder, hidden_size=target.hidden_size, fingerprint=target.fingerprint) as store:
        done = set(store.keys)
        missing = [(key, sample) for key, sample in samples.items() if key not in done]
        missing.sort(key=lambda pair: -len(pair[1].ids))
        tokens, count = 0, len(done)
        on_progress(count, len(samples), 0)
        while missing:
            size = max(1, READ_TOKENS // len(missing[0][1].ids))
            batch, missing = missing[:size], missing[size:]
            hidden_BTH = target.hidden(_padded([sample.ids for _, sample in batch]), [len(s.ids) for _, s in batch])
            for (key, sample), hidden_TH in zip(batch, hidden_BTH, strict=True):
                store.append(Sample(key, sample.ids, hidden_TH[: len(sample.ids)], sample.supervised))
                tokens += len(sample.ids)
            count += len(batch)
            on_progress(count, len(samples), tokens)
        store.sync()


def _padded(rows: list[list[int]]) -> torch.Tensor:
    """ids [B, T], zeros on the right."""
    longest = max(map(len, rows))
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows])
