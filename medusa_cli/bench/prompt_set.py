"""Prompts of a bench: read from a file, picked evenly, and looked at for what would mislead.

This file knows no model; tokens come from the caller.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_cli.data.conversations import is_text
from medusa_cli.errors import DataError

# Chance that two tokens drawn from a text are the same one: 0.0075 over mixed English prompts in a vocabulary of
# 49,152 (punctuation, spaces and articles repeat in any language), against 1 / vocabulary for random tokens.
NATURAL_COINCIDENCE = 0.0075
_FEWEST_TOKENS = 100


@dataclass(frozen=True)
class Question:
    """One line of a prompt file: the first turn only, since every arm answers one prompt at a time."""

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
    """The questions in a .jsonl file of `{"id", "category", "turns"}`; `prompt` may stand in for `turns`.

    Raises DataError naming the line at fault.
    """
    try:
        # JSON may hold line breaks of Unicode as they are
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"can't read the prompts {file}: {error}", "name a .jsonl file, one prompt a line") from error
    questions = [_question(line, f"{file}:{number}", number) for number, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise DataError(f"{file} holds no prompt", 'one line for each: {"id": "a", "category": "b", "turns": ["…"]}')
    twice = [name for name, times in Counter(question.id for question in questions).items() if times > 1]
    if twice:
        raise DataError(f"{file}: the id '{twice[0]}' is there twice", "give each prompt an id of its own")
    return questions


def _question(line: str, where: str, number: int) -> Question:
    """One line as a question, or DataError."""
    hint = 'a line looks like {"id": "a", "category": "b", "turns": ["Why is the sky blue?"]}'
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: this is not JSON ({getattr(error, 'msg', error)})", hint) from error
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: this is no object", hint)
    text = _text(row)
    if text is None:
        raise DataError(f"{where}: no text under 'turns' or 'prompt'", hint)
    if not is_text(text):
        raise DataError(f"{where}: holds half of a surrogate pair, which is no character", hint)
    return Question(str(row.get("id", number)), str(row.get("category", "all")), text)


def _text(row: Mapping[str, Any]) -> str | None:
    """The first turn, or None when there is none."""
    turns = row.get("turns", row.get("prompt"))
    first = turns[0] if isinstance(turns, list) and turns else turns
    return first if isinstance(first, str) and first.strip() else None


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
