"""Prompts of a bench: read from a file, picked evenly, and looked at for what would mislead.

This file knows no model; tokens come from the caller.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from medusa_cli.data.prompts import read_prompts
from medusa_cli.errors import DataError

# Chance that two tokens drawn from a text are the same one: 0.0075 over mixed English prompts in a vocabulary of
# 49,152 (punctuation, spaces and articles repeat in any language), against 1 / vocabulary for random tokens.
NATURAL_COINCIDENCE = 0.0075
_FEWEST_TOKENS = 100


@dataclass(frozen=True)
class Question:
    """What is asked: one text, as every arm answers one at a time."""

    id: str
    category: str
    text: str


@dataclass(frozen=True)
class BenchPrompt:
    """A question as token ids, the chat template around it included."""

    id: str
    category: str
    ids: tuple[int, ...]


def read_questions(file: Path) -> list[Question]:
    """The questions in a file that `read_prompts` reads.

    Raises DataError, as it does, and for a conversation, of which the last message alone would be asked.
    """
    prompts = read_prompts(file)
    for prompt in prompts:
        if len(prompt.messages) > 1:
            raise DataError(
                f"{file}: the prompt '{prompt.id}' is a conversation of {len(prompt.messages)} messages",
                'a bench asks one question at a time: {"id": "a", "category": "b", "turns": ["Why is the sky blue?"]}',
            )
    return [Question(prompt.id, prompt.category, prompt.messages[0].content) for prompt in prompts]


def pick(questions: Sequence[Question], count: int | None) -> list[Question]:
    """`count` questions spread evenly over the file, which is often sorted by category; all of them for None."""
    if count is None or count >= len(questions):
        return list(questions)
    return [questions[place * len(questions) // count] for place in range(count)]


def repeated(questions: Sequence[Question]) -> list[list[str]]:
    """Groups of ids whose texts are the same."""
    groups: dict[str, list[str]] = {}
    for question in questions:
        groups.setdefault(question.text, []).append(question.id)
    return [ids for ids in groups.values() if len(ids) > 1]


def random_looking(questions: Sequence[Question], encode: Callable[[str], list[int]], vocab_size: int) -> list[str]:
    """Ids of questions whose tokens repeat no more than tokens drawn at random would.

    encode  plain text to ids, without a chat template

    Guesses on random tokens are accepted at a rate that says nothing about real use. Text of at least 100 tokens
    is judged by itself and shorter text together, each different text once; with fewer tokens nothing is claimed.
    """
    # Half way, as a ratio, between the two expectations.
    bound = (NATURAL_COINCIDENCE / vocab_size) ** 0.5
    if bound >= NATURAL_COINCIDENCE / 2:
        return []  # in a vocabulary of a few hundred entries the two can't be told apart
    first_of_each = {question.text: question for question in reversed(questions)}
    tokens = {question.id: encode(text) for text, question in first_of_each.items()}
    long = {name: ids for name, ids in tokens.items() if len(ids) >= _FEWEST_TOKENS}
    short = {name: ids for name, ids in tokens.items() if name not in long}
    found = {name for name, ids in long.items() if _coincidence(ids) < bound}
    pooled = [token for ids in short.values() for token in ids]
    if len(pooled) >= _FEWEST_TOKENS and _coincidence(pooled) < bound:
        found |= set(short)
    return [question.id for question in questions if first_of_each[question.text].id in found]


def _coincidence(ids: Sequence[int]) -> float:
    """The share of pairs of places that hold the same token."""
    same = sum(times * (times - 1) for times in Counter(ids).values())
    return same / (len(ids) * (len(ids) - 1))
