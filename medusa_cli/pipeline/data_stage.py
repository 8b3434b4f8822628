"""The data stage: prompts, answers to them from whoever the recipe names, and the hidden states of both.

written/prompts.jsonl          prompts the target wrote                         (--dataset self)
written/answers/               its answers, with the states that decided them
written/server/answers.jsonl   answers of a server                              (--answers-from URL)
written/read/                  hidden states of answers that the target read: the server's, or the data's own
written/held-out/              what the target itself says to those that are held out
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np

from medusa_cli.config.recipe import DataSettings
from medusa_cli.data.conversations import Conversation, Counts, Message, read_conversations
from medusa_cli.data.tokens import check_share
from medusa_cli.data.user_turns import asked_turns
from medusa_cli.errors import DataError, TrainingError
from medusa_cli.pipeline.data_context import Gathered, Stage
from medusa_cli.pipeline.given_answers import read_answers, tokenized
from medusa_cli.pipeline.planning.disk import check_answers
from medusa_cli.pipeline.self_generated import answer, keep_answers, write_prompts_of_its_own
from medusa_cli.pipeline.server_answers import check_server, served
from medusa_cli.train.corpus import Corpus

PLAIN_PROMPT = 32  # tokens of a text without roles that the target goes on from when it is measured


def gather(stage: Stage) -> Gathered:
    """The store of hidden states that the recipe asks for; what is there already is not made again.

    Raises DataError when the data holds nothing usable, TrainingError before anything is written when the states may
    not fit on the disk, and what the writing itself raises.
    """
    data = stage.recipe.data
    if data.dataset != "self":
        return _from_data_set(stage)
    if data.server:
        check_server(stage)
    check_answers(stage, data.num_samples)
    return _answered(stage, write_prompts_of_its_own(stage))


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


def _from_data_set(stage: Stage) -> Gathered:
    """Its own answers are read; without any, or when others are asked for, its prompts are answered."""
    data, counts = stage.recipe.data, Counts()
    conversations = list(islice(conversations_of(data, counts), data.num_samples))
    if has_answers(conversations) and data.answers_from == "auto":
        gathered = _read_given(stage, conversations, counts)
    else:
        asked = asked_turns(conversations, data.num_samples)
        if not asked:
            raise DataError(f"{data.dataset}: plain text asks nothing", "leave --answers-from out to learn it as it is")
        gathered = _answered(stage, asked)
    return replace(
        gathered, notes=[*_left_out(counts), *gathered.notes], counts={**counts.numbers(), **gathered.counts}
    )


def has_answers(conversations: Iterable[Conversation]) -> bool:
    """Whether there is anything in them to learn as it is."""
    return any(message.role in ("assistant", "text") for row in conversations for message in row.messages)


def _answered(stage: Stage, asked: Mapping[str, Sequence[Message]]) -> Gathered:
    """Answers of the server, if the recipe names one, else of the target."""
    check_answers(stage, len(asked))
    return served(stage, asked) if stage.recipe.data.server else answer(stage, asked)


def _read_given(stage: Stage, conversations: Sequence[Conversation], counts: Counts) -> Gathered:
    """Answers as the data has them."""
    samples = tokenized(stage, conversations, counts)
    share = check_share(counts)
    # a key is a place among the usable rows: ids of the data may repeat
    numbered = {str(place): sample for place, sample in enumerate(samples)}
    gathered = read_answers(stage, numbered, "the answers of the data set")
    warnings = [*([share] if share else []), *gathered.warnings]
    return replace(gathered, answers={"by": "the data set", **gathered.answers}, warnings=warnings)


def own_words(stage: Stage, asked: Mapping[str, Sequence[int]], place: Path) -> Corpus:
    """What the target itself says after these prompts (ids by key), kept in the folder `place`; maybe other keys too.

    Heads are measured on it: how well they guess words that the target would not say is of no use. Raises
    TrainingError when there are no prompts: none of the held-out samples left room for an answer.
    """
    if not asked:
        raise TrainingError("no held-out sample leaves room for an answer", "raise --max-seq-length, or data.held_out")
    keep_answers(stage, asked, place, "held-out answers")
    return Corpus.open(place)


def prompts_of(stage: Stage, corpus: Corpus, samples: Sequence[int]) -> dict[str, list[int]]:
    """Ids of what stands before these samples' first answers, by key, where they leave room for another answer."""
    prompts = {corpus.keys[sample]: _prompt_of(corpus, sample) for sample in samples}
    return {key: ids for key, ids in prompts.items() if len(ids) < stage.longest_text}


def _prompt_of(corpus: Corpus, sample: int) -> list[int]:
    """The tokens before the first learnt one; some first tokens of a text that is learnt whole."""
    place = slice(int(corpus.offsets_S[sample]), int(corpus.offsets_S[sample + 1]))
    first = int(np.argmax(corpus.supervised_T[place]))
    ids: list[int] = corpus.ids_T[place].tolist()
    return ids[:first] if first > 1 else ids[: min(PLAIN_PROMPT, len(ids) // 2 + 1)]


def _left_out(counts: Counts) -> list[str]:
    """A sentence when rows were left out or shortened."""
    return [counts.describe()] if counts.skipped or counts.cut else []
