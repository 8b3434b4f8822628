"""Answers of a server: asked for row by row, kept in a file that grows, then read by the target for its hidden states.

A line of server/answers.jsonl is {"key", "answer", "finish_reason", "tokens", "model"}. Prompts that the server refused
have none, and are asked again by the next run.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from medusa_cli.data.conversations import Conversation, Counts, Message
from medusa_cli.data.distill import append_row, read_written
from medusa_cli.data.server import Refused, Server, find_model, replies
from medusa_cli.data.tokens import check_share
from medusa_cli.errors import DataError
from medusa_cli.model.target import Target
from medusa_cli.pipeline.data_context import Gathered, Stage
from medusa_cli.pipeline.given_answers import read_answers, tokenized
from medusa_cli.pipeline.self_generated import fitting


def check_server(stage: Stage) -> None:
    """Raise DataError, before hours of writing prompts, when nobody listens; fine when all answers are there."""
    _check_template(stage.target)
    if len(_stored(stage)) < stage.recipe.data.num_samples:
        _server(stage)


def served(stage: Stage, asked: Mapping[str, Sequence[Message]]) -> Gathered:
    """The server answers what it hasn't answered yet, and the target reads all answers to these prompts.

    Raises DataError when the server fails for good, has answered nothing usable, or is another one than before.
    """
    _check_template(stage.target)
    prompts, counts = fitting(stage, asked), Counts()
    _ask_missing(stage, {key: asked[key] for key in prompts.ids}, counts)
    rows = {row["key"]: row for row in _stored(stage) if row["key"] in prompts.ids}
    if not rows:
        raise DataError(f"the server answered none of {len(prompts.ids)} prompts; {_refusals(counts)}", _LOOK)
    answered = (_conversation(asked[key], rows[key]) for key in prompts.ids if key in rows)
    samples = tokenized(stage, answered, counts)
    check_share(counts)
    gathered = read_answers(stage, {sample.key: sample for sample in samples}, "the server's answers")
    return replace(
        gathered,
        answers={**_account(stage, list(rows.values())), **gathered.answers},
        counts={"prompts refused or lost": counts.skipped.total(), "answers shortened": counts.cut},
        notes=[*prompts.notes, *([_refusals(counts)] if counts.skipped else [])],
    )


_LOOK = "ask the server by hand, for example with curl; data.server_model=NAME says which of its models"


def _check_template(target: Target) -> None:
    """Raise DataError for a base model: what a server writes around its prompts isn't known here."""
    if not target.tokenizer.chat_template:
        raise DataError(
            f"{target.name} has no chat template, and chat completions are written with one",
            "use --answers-from self, or a tokenizer with the template that the server uses",
        )


def _ask_missing(stage: Stage, asked: Mapping[str, Sequence[Message]], counts: Counts) -> None:
    """Append a row for every answer that is missing; refusals go to `counts`, or raise DataError."""
    done = {row["key"] for row in _stored(stage)}
    missing = {key: messages for key, messages in asked.items() if key not in done}
    ready, tokens = len(asked) - len(missing), 0
    stage.on_progress("answers", ready, len(asked), 0)
    if not missing:
        return
    server = _server(stage)
    with closing(replies(server, missing)) as answers:
        for count, (key, reply) in enumerate(answers, start=1):
            if isinstance(reply, Refused):
                if stage.recipe.data.on_bad_row == "fail":
                    raise DataError(f"{key}: {reply.reason}", "leave it out of the data, or use --on-bad-row skip")
                counts.skip(reply.reason, key)
            else:
                row = {"key": key, "answer": reply.text, "finish_reason": reply.finish_reason, "tokens": reply.tokens}
                append_row(_file(stage), {**row, "model": server.model})
                tokens += reply.tokens
            stage.on_progress("answers", ready + count, len(asked), tokens)


def _server(stage: Stage) -> Server:
    """The server with the name of its model. Raises DataError when that isn't the one that answered before."""
    data = stage.recipe.data
    assert data.server is not None
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    if not (key.isascii() and key.isprintable()):
        raise DataError("OPENAI_API_KEY holds what can't stand in a header", "set it to the key alone")
    server = Server(
        url=data.server,
        model=data.server_model or "",
        temperature=data.server_temperature,
        max_tokens=stage.answer_tokens,
        timeout=data.server_timeout,
        tries=data.server_tries,
        in_flight=data.rows,
        key=key,
    )
    server = replace(server, model=server.model or find_model(server))
    others = {row["model"] for row in _stored(stage)} - {server.model}
    if others:
        raise DataError(
            f"{_file(stage)} holds answers of {', '.join(sorted(others))}; the server has {server.model}",
            "choose another --output-dir, or serve the model that answered before (data.server_model=NAME)",
        )
    return server


def _conversation(messages: Sequence[Message], row: Mapping[str, Any]) -> Conversation:
    """What was asked and the server's answer, of which alone is learnt."""
    return Conversation(
        [*messages, Message("assistant", row["answer"])],
        row["key"],
        only_last=True,
        unfinished=row["finish_reason"] == "length",
    )


def _account(stage: Stage, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Who answered and how."""
    return {
        "by": "a server",
        "url": stage.recipe.data.server,
        "model": ", ".join(sorted({row["model"] for row in rows})),
        "temperature": stage.recipe.data.server_temperature,
        "max_tokens": stage.answer_tokens,
        "finish_reasons": dict(Counter(row["finish_reason"] for row in rows)),
    }


def _refusals(counts: Counts) -> str:
    """How many answers are missing, and why."""
    return f"{counts.skipped.total()} without a usable answer: {counts.reasons}"


def _file(stage: Stage) -> Path:
    return stage.folder / "server" / "answers.jsonl"


def _stored(stage: Stage) -> list[dict[str, Any]]:
    """The answers that are there."""
    file = _file(stage)
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = read_written(file)
    kinds = {"key": str, "answer": str, "finish_reason": str, "model": str}
    if not all(
        isinstance(row, dict) and all(isinstance(row.get(n), kind) for n, kind in kinds.items()) for row in rows
    ):
        raise DataError(f"{file} is damaged", "delete it to have the server asked again")
    return rows
