"""Prompts to decode from, for generate, bench and distillation. This file knows no tokenizer."""

from dataclasses import dataclass
from pathlib import Path

from medusa_cli.data.conversations import BadRow, Message, check_order, messages_of
from medusa_cli.data.rows import Broken, Row, read_rows
from medusa_cli.errors import DataError
from medusa_cli.util.paths import expanded


@dataclass(frozen=True)
class Prompt:
    """What is asked: messages that end with the user's."""

    id: str
    category: str
    messages: list[Message]


def read_prompts(file: Path) -> list[Prompt]:
    """The prompts in `file`: one a line in .txt, one a row in .jsonl, .json and .parquet.

    A row holds `turns` (the first is used), `prompt`, or any layout of a conversation, whose last answers are
    dropped; `id` and `category` are optional. Raises DataError for a file that can't be read, a row that is no prompt,
    an id used twice, or no prompt at all.
    """
    if not expanded(file).exists():
        raise DataError(f"no such prompts file: {file}", f"looked in {expanded(file).parent.absolute()}")
    prompts: dict[str, Prompt] = {}
    for row in read_rows(str(file), split="train"):
        place = f"{file}, row {row.number}"
        if isinstance(row.value, Broken):
            raise row.value.error
        try:
            prompt = _prompt(row)
        except BadRow as fault:
            raise fault.at(place) from fault
        if prompt.id in prompts:
            raise BadRow(f"'{prompt.id}' names an earlier row too", "id", place, "give each prompt an id of its own")
        prompts[prompt.id] = prompt
    if not prompts:
        raise DataError(
            f"{file} holds no prompts", 'write one prompt a line (.txt), or {"prompt": "..."} rows (.jsonl)'
        )
    return list(prompts.values())


def _prompt(row: Row) -> Prompt:
    """The prompt in one row."""
    messages = [Message("user", m.content) if m.role == "text" else m for m in messages_of(row.value)]
    check_order(messages)
    while messages and messages[-1].role != "user":
        messages = messages[:-1]
    if not messages:
        raise BadRow("nothing is asked: no user message", "messages")
    stored = {key: str(value) for key, value in row.value.items() if key in ("id", "category") and value is not None}
    return Prompt(stored.get("id", str(row.number)), stored.get("category", "all"), messages)
