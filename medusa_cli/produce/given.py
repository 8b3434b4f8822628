"""The data stage: prompts, answers to them from whoever the recipe names, and the hidden states of both.

written/prompts.jsonl          prompts the target wrote                         (--dataset self)
written/answers/               its answers, with the states that decided them
written/server/answers.jsonl   answers of a server                              (--answers-from URL)
written/read/                  hidden states of answers that the target read: the server's, or the data's own
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np

from medusa_cli.data.asked import asked_turns
from medusa_cli.data.conversations import Conversation, Counts, read_conversations
from medusa_cli.data.tokens import check_share, tokenize
from medusa_cli.errors import DataError, TrainingError
from medusa_cli.produce.read import read_samples
from medusa_cli.produce.served import check_server, served
from medusa_cli.produce.surprise import perplexity, warning_of
from medusa_cli.produce.write import (
    Gathered,
    OnProgress,
    answer,
    longest_text,
    template_of,
    write_answers,
    write_prompts_of_its_own,
)
from medusa_cli.recipe import DataSettings, Recipe
from medusa_cli.target.model import Target
from medusa_cli.train.corpus import Corpus
from medusa_cli.train.store import Sample

PLAIN_PROMPT = 32  # tokens of a text without roles that the target goes on from when it is measured


def gather(recipe: Recipe, target: Target, folder: Path, on_progress: OnProgress) -> Gathered:
    """The store of hidden states that the recipe asks for; what is there already is not made again.

    Raises DataError when the data holds nothing usable, and what the writing itself raises.
    """
    if recipe.data.dataset != "self":
        return _from_data_set(recipe, target, folder, on_progress)
    if recipe.data.server:
        check_server(recipe, target, folder)
    asked = write_prompts_of_its_own(recipe, target, folder, on_progress)
    return (served if recipe.data.server else answer)(recipe, target, asked, folder, on_progress)


def conversations_of(data: DataSettings, counts: Counts) -> Iterator[Conversation]:
    """The data set's conversations, as `read_conversations`."""
    return read_conversations(
        data.dataset,
        split=data.dataset_split,
        counts=counts,
        on_bad_row=data.on_bad_row,
        config=data.dataset_config,
        streaming=data.streaming,
    )


def _from_data_set(recipe: Recipe, target: Target, folder: Path, on_progress: OnProgress) -> Gathered:
    """Its own answers are read; without any, or when others are asked for, its prompts are answered."""
    data, counts = recipe.data, Counts()
    conversations = list(islice(conversations_of(data, counts), data.num_samples))
    answered = any(message.role in ("assistant", "text") for row in conversations for message in row.messages)
    if answered and data.answers_from == "auto":
        gathered = _read_given(recipe, target, conversations, counts, folder, on_progress)
    else:
        asked = asked_turns(conversations, data.num_samples)
        if not asked:
            raise DataError(f"{data.dataset}: plain text asks nothing", "leave --answers-from out to learn it as it is")
        gathered = (served if data.server else answer)(recipe, target, asked, folder, on_progress)
    return replace(
        gathered, notes=[*_left_out(counts), *gathered.notes], counts={**counts.numbers(), **gathered.counts}
    )


def _read_given(
    recipe: Recipe,
    target: Target,
    conversations: Sequence[Conversation],
    counts: Counts,
    folder: Path,
    on_progress: OnProgress,
) -> Gathered:
    """Answers as the data has them, with a warning when the target would hardly give them."""
    longest, bad = longest_text(recipe, target), recipe.data.on_bad_row
    samples = list(tokenize(target.tokenizer, conversations, max_length=longest, counts=counts, on_bad_row=bad))
    share = check_share(counts)
    target.check_ids(sample.ids for sample in samples)
    figure = perplexity(target, samples)
    unlikely = warning_of(figure, "the answers of the data set")
    # a key is a place among the usable rows: ids of the data may repeat
    numbered = {str(place): sample for place, sample in enumerate(samples)}
    read_samples(target, numbered, folder / "read", lambda *news: on_progress("reading", *news))
    account = {"by": "the data set", "template": template_of(target.tokenizer), "perplexity": figure}
    warnings = [text for text in (share, unlikely) if text]
    return Gathered(folder / "read", by_target=False, answers=account, warnings=warnings)


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
