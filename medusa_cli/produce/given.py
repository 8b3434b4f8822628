"""The data stage for files and hub data sets: answers that are given are read, prompts without one are answered."""

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from medusa_cli.data.conversations import Counts, read_conversations
from medusa_cli.data.tokens import Tokens, check_share, tokenize
from medusa_cli.errors import TrainingError
from medusa_cli.produce.write import Gathered, OnProgress, answer, longest_text, write_answers
from medusa_cli.recipe import Recipe
from medusa_cli.target.model import Target
from medusa_cli.train.corpus import Corpus
from medusa_cli.train.store import HiddenStore, Sample

READ_TOKENS = 4096  # tokens of one forward while given conversations are read
PLAIN_PROMPT = 32  # tokens of a text without roles that the target goes on from when it is measured


def read_given(recipe: Recipe, target: Target, folder: Path, on_progress: OnProgress) -> Gathered:
    """The store of hidden states for `data.dataset`.

    A data set whose conversations hold answers is read as it is; one of prompts is answered by the target. Raises
    DataError when nothing in it is usable.
    """
    data, counts = recipe.data, Counts()
    rows = read_conversations(data.dataset, split=data.dataset_split, counts=counts)
    conversations = list(islice(rows, data.num_samples))
    if not any(message.role in ("assistant", "text") for row in conversations for message in row.messages):
        asked = {row.place: row.messages for row in conversations}
        gathered = answer(recipe, target, asked, folder / "answers", on_progress)
        return Gathered(gathered.store, True, [*_left_out(counts), *gathered.notes])
    longest = longest_text(recipe, target)
    samples = list(tokenize(target.tokenizer, conversations, max_length=longest, counts=counts))
    warning = check_share(counts)
    store = _read(target, samples, folder / "read", lambda *news: on_progress("reading", *news))
    return Gathered(store, False, [*_left_out(counts), *([warning] if warning else [])])


def own_words(
    recipe: Recipe, target: Target, corpus: Corpus, samples: Sequence[int], on_progress: OnProgress
) -> Corpus:
    """What the target itself says where these samples' first answers stand.

    Heads are measured on it: how well they guess words that the target would not say is of no use. Raises
    TrainingError when none of the samples leaves room for an answer.
    """
    longest = longest_text(recipe, target)
    prompts = {corpus.keys[sample]: _prompt_of(corpus, sample) for sample in samples}
    fitting = {key: ids for key, ids in prompts.items() if len(ids) < longest}
    if not fitting:
        raise TrainingError("no held-out sample leaves room for an answer", "raise --max-seq-length, or data.held_out")
    written: list[Sample] = []
    on_progress("held-out answers", 0, len(fitting), 0)
    for sample in write_answers(recipe, target, fitting):
        written.append(sample)
        on_progress("held-out answers", len(written), len(fitting), sum(len(sample.ids) - 1 for sample in written))
    return Corpus.from_samples(written)


def _prompt_of(corpus: Corpus, sample: int) -> list[int]:
    """The tokens before the first learnt one; some first tokens of a text that is learnt whole."""
    place = slice(int(corpus.offsets_S[sample]), int(corpus.offsets_S[sample + 1]))
    first = int(np.argmax(corpus.supervised_T[place]))
    ids: list[int] = corpus.ids_T[place].tolist()
    return ids[:first] if first > 1 else ids[: min(PLAIN_PROMPT, len(ids) // 2 + 1)]


def _left_out(counts: Counts) -> list[str]:
    """A sentence when rows were left out or shortened."""
    return [counts.describe()] if counts.skipped or counts.cut else []


def _read(target: Target, samples: list[Tokens], folder: Path, on_progress: Callable[[int, int, int], None]) -> Path:
    """Hidden states of every sample that has none yet; longest first, so that a batch wastes little."""
    with HiddenStore(folder, hidden_size=target.hidden_size, fingerprint=target.fingerprint) as store:
        done = set(store.keys)
        missing = [(str(key), sample) for key, sample in enumerate(samples) if str(key) not in done]
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
    return folder


def _padded(rows: list[list[int]]) -> torch.Tensor:
    """ids [B, T], zeros on the right."""
    longest = max(map(len, rows))
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows])
