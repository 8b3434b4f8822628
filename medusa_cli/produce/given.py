"""The data stage for files and hub data sets: answers that are given are read, prompts without one are answered."""

from collections.abc import Iterator
from pathlib import Path

import torch

from medusa_cli.data.conversations import Conversation, Counts, read_conversations
from medusa_cli.data.tokens import Tokens, check_share, tokenize
from medusa_cli.errors import DataError
from medusa_cli.produce.write import OnProgress, answer
from medusa_cli.recipe import Recipe
from medusa_cli.target.model import Target
from medusa_cli.train.store import HiddenStore, Sample

READ_TOKENS = 4096  # tokens of one forward while given conversations are read


def read_given(recipe: Recipe, target: Target, folder: Path, on_progress: OnProgress) -> tuple[Path, str | None]:
    """The store of hidden states for `data.dataset`, and a warning about its loss masks if there is one.

    A data set whose conversations hold answers is read as it is; one of prompts is answered by the target. Raises
    DataError when nothing in it is usable.
    """
    data, counts = recipe.data, Counts()
    rows = _first(read_conversations(data.dataset, split=data.dataset_split, counts=counts), data.num_samples)
    conversations = list(rows)
    if not any(message.role in ("assistant", "text") for row in conversations for message in row.messages):
        texts = {row.id: row.messages[-1].content for row in conversations}
        return answer(recipe, target, texts, folder / "answers", on_progress), None
    samples = list(tokenize(target.tokenizer, conversations, max_length=data.max_seq_length, counts=counts))
    warning = check_share(counts)
    return _read(target, samples, folder / "read", on_progress), warning


def _first(conversations: Iterator[Conversation], wanted: int) -> Iterator[Conversation]:
    """At most `wanted` conversations, ids told apart."""
    for index, row in enumerate(conversations):
        if index == wanted:
            return
        yield row


def _read(target: Target, samples: list[Tokens], folder: Path, on_progress: OnProgress) -> Path:
    """Hidden states of every sample that has none yet; longest first, so that a batch wastes little."""
    with HiddenStore(folder, hidden_size=target.hidden_size, fingerprint=target.fingerprint) as store:
        done = set(store.keys)
        missing = [(str(key), sample) for key, sample in enumerate(samples) if str(key) not in done]
        missing.sort(key=lambda pair: -len(pair[1].ids))
        tokens, count = 0, len(done)
        on_progress("reading", count, len(samples), 0)
        while missing:
            longest = len(missing[0][1].ids)
            batch, missing = _split(missing, max(1, READ_TOKENS // longest))
            hidden_BTH = target.hidden(_padded([sample.ids for _, sample in batch]), [len(s.ids) for _, s in batch])
            for (key, sample), hidden_TH in zip(batch, hidden_BTH, strict=True):
                store.append(Sample(key, sample.ids, hidden_TH[: len(sample.ids)], sample.supervised))
                tokens += len(sample.ids)
            count += len(batch)
            on_progress("reading", count, len(samples), tokens)
    if not count:
        raise DataError("no sample to read", "check the data set, and --num-samples")
    return folder


def _split(pairs: list[tuple[str, Tokens]], at: int) -> tuple[list[tuple[str, Tokens]], list[tuple[str, Tokens]]]:
    return pairs[:at], pairs[at:]


def _padded(rows: list[list[int]]) -> torch.Tensor:
    """ids [B, T], zeros on the right."""
    longest = max(map(len, rows))
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows])
