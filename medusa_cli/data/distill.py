"""Data without a data set: the target writes its own prompts, then answers them.

Prompts are sampled from the chat template's prefix up to where the user's text starts (published as Magpie,
arXiv 2406.08464), steered by task openings and topics; answers are what the target would say. Both files grow row by
row, so a kill loses at most the rows in flight. The writer, which decodes, is handed in by the caller.
"""

import json
import os
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from medusa_cli.config.recipe import DataSettings
from medusa_cli.data.conversations import BadRow, Message
from medusa_cli.data.template import render, takes_parts
from medusa_cli.errors import DataError, TrainingError
from medusa_cli.util.plain_json import parse_json

SENTINEL = "\u241ftext\u241f"  # stands for the user's text while the template is rendered


@dataclass(frozen=True)
class Written:
    """One finished text: the index of its prompt, its ids, and the hidden states [T, H] that decided them.

    taps_TX   inner states of prompt and text, where these were wanted
    """

    index: int
    token_ids: list[int]
    finish_reason: str
    hidden_TH: Tensor
    taps_TX: Tensor | None = None


@dataclass(frozen=True)
class Steered:
    """A prompt to be: its id, the opening the target continues, and the token ids up to there."""

    id: int
    opening: str
    ids: list[int]


Write = Callable[[Sequence[Steered]], Iterator[Written]]


def steered(settings: DataSettings, tokenizer: Any, seed: int) -> list[Steered]:
    """The openings of all samples, shuffled, each with the template's prefix in front."""
    rng, topics = random.Random(seed), random.Random(seed + 1)
    openings: list[str] = []
    while len(openings) < settings.num_samples:
        block = list(settings.openings)
        rng.shuffle(block)
        openings += block
    # More samples begin like fewer: what is drawn for one doesn't depend on how many follow.
    filled = [text.replace("{topic}", topics.choice(settings.topics)) for text in openings[: settings.num_samples]]
    before = user_prefix(tokenizer)
    # A tokenizer puts the space before a word: an opening's last space is left for the target to write.
    return [Steered(index, text, _start_ids(tokenizer, before, text.rstrip(" "))) for index, text in enumerate(filled)]


def user_prefix(tokenizer: Any) -> str:
    """What the chat template puts before a user's first text; empty for a base model, which starts from nothing."""
    if not getattr(tokenizer, "chat_template", None):
        return ""
    messages = [Message("user", SENTINEL)]
    try:
        rendered = render(tokenizer, messages, opening=True, parts=takes_parts(tokenizer, messages))
    except BadRow as fault:
        raise fault.at("prompts of the model's own") from fault
    before, found, _ = rendered.partition(SENTINEL)
    if not found:
        raise DataError("the chat template changes the user's text", "give prompts in a file with --dataset FILE")
    return before


def write_prompts(
    wanted: Sequence[Steered], file: Path, tokenizer: Any, write: Write, ends: frozenset[int] = frozenset()
) -> Generator[int, None, None]:
    """Append a prompt to `file` for every one still missing; yields how many tokens each new one took.

    ends   ids with which the model ends a turn: they are no text

    Raises TrainingError when the disk takes no more.
    """
    done = {row["id"] for row in read_prompts_of_its_own(file)}
    missing = [one for one in wanted if one.id not in done]
    for written in write(missing):
        one = missing[written.index]
        shown = [index for index in written.token_ids if index not in ends]
        text = tokenizer.decode(shown, skip_special_tokens=True)
        opening = one.opening.rstrip(" ")
        append_row(file, {"id": one.id, "prompt": (opening + text).strip(), "tokens": len(written.token_ids)})
        yield len(written.token_ids)


def read_prompts_of_its_own(file: Path) -> list[dict[str, Any]]:
    """The rows of `write_prompts`. Raises DataError when the file holds something else."""
    rows = read_written(file)
    kinds = {"id": int, "prompt": str, "tokens": int}
    if not all(
        isinstance(row, dict) and all(isinstance(row.get(n), kind) for n, kind in kinds.items()) for row in rows
    ):
        raise DataError(f"{file} is damaged: a line is no prompt", _WRITE_AGAIN)
    return rows


_WRITE_AGAIN = "delete it to have it written again"


def read_written(file: Path) -> list[dict[str, Any]]:
    """The complete rows of a file that grows; a last line cut by a kill or a full disk is removed from the file."""
    if not file.exists():
        return []
    text = file.read_bytes()
    whole = text.rfind(b"\n") + 1
    try:
        rows = [parse_json(line) for line in text[:whole].splitlines()]
    except ValueError as error:
        raise DataError(f"{file} is damaged: {error}", _WRITE_AGAIN) from error
    if whole < len(text):
        os.truncate(file, whole)
    return rows


def _start_ids(tokenizer: Any, before: str, opening: str) -> list[int]:
    """The ids the target goes on from; the token that parts texts where there would be none."""
    ids = list(tokenizer(before + opening, add_special_tokens=not before).input_ids)
    return ids or [tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id]


def append_row(file: Path, row: dict[str, Any]) -> None:
    """One whole line, handed to the system at once."""
    line = memoryview((json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "replace"))
    try:
        with file.open("ab", buffering=0) as out:
            while line:
                line = line[out.write(line) :]
    except OSError as error:
        raise TrainingError(
            f"can't write {file}: {error.strerror}", "free some space and run the same command again"
        ) from error
