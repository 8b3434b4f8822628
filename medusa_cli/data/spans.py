"""Where the answers are in a rendered chat, and which tokens cover them. This file knows no files and no counts.

It is found by rendering, never by searching: the chat template is rendered up to the answer, and with a marker in the
answer's place. What surrounds the marker surrounds the answer, whatever the answer says or the user quotes.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateError

from medusa_cli.data.conversations import BadRow, Message

_MARKER = "\ue000\ue001\ue000"
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
UNSTABLE = "the chat template renders an answer differently once the chat goes on"
UNSTABLE_HINT = "use a template with {% generation %} tags, or one that renders each message the same way everywhere"
# Characters that a template may write of its own, and times that it may write what it is given: far more than any does.
OWN_WORDS, REPEATED = 1_000_000, 8
_SILENT = "the chat template leaves the assistant's words out"
_SILENT_HINT = "use the chat template that the model was trained with"


@dataclass(frozen=True)
class Span:
    """An answer in the rendered text: characters start to end; its end-of-turn token starts before `limit`."""

    start: int
    end: int
    limit: int


def encode(tokenizer: Any, rendered: str) -> list[int]:
    """Ids of rendered text, whose special tokens the template has written."""
    return list(tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"])


def as_dicts(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Messages as a chat template takes them."""
    return [{"role": message.role, "content": message.content} for message in messages]


def render(tokenizer: Any, messages: Sequence[Message], *, opening: bool) -> str:
    """The chat template's text; `opening` adds the words that open the assistant's turn."""
    try:
        text = str(
            tokenizer.apply_chat_template(
                as_dicts(messages), tokenize=False, add_generation_prompt=opening, return_dict=False
            )
        )
    except TemplateError as error:
        raise BadRow(
            f"the chat template refuses it ({error})", "messages", hint="the model takes no such sequence of roles"
        ) from error
    given = sum(len(message.content) for message in messages)
    if len(text) > OWN_WORDS + REPEATED * given:
        raise BadRow(
            f"the chat template makes {len(text):,} characters of {given:,}, which would take for ever to read",
            "messages",
            hint="use the chat template that the model was trained with",
        )
    return text


def answer_spans(tokenizer: Any, messages: Sequence[Message], text: str) -> list[Span] | None:
    """Where each non-blank answer is in `text`, or None when the rendering of prefixes doesn't tell."""
    spans = []
    for index, message in enumerate(messages):
        if message.role != "assistant" or not message.content.strip():
            continue
        span = _answer_span(tokenizer, messages[: index + 1], text)
        if span is None:
            return None
        spans.append(span)
    return spans


def _answer_span(tokenizer: Any, messages: Sequence[Message], text: str) -> Span | None:
    """Where the last of `messages`, an answer, is in `text`, which may go on after it."""
    opening = render(tokenizer, messages[:-1], opening=True)
    through = render(tokenizer, messages, opening=False)
    marked = render(tokenizer, [*messages[:-1], Message("assistant", _MARKER)], opening=False)
    if _MARKER not in marked:
        raise BadRow(_SILENT, "messages", hint=_SILENT_HINT)
    if not (text.startswith(opening) and through.startswith(opening) and marked.startswith(opening)):
        return None
    before, marker, after = marked[len(opening) :].partition(_MARKER)
    if not marker or not through.endswith(after):
        return None
    answer = through[len(opening) : len(through) - len(after)].removeprefix(before)
    # Some templates put a block between opening and answer in the last turn only (an empty <think>).
    for gap in (before, ""):
        start = len(opening) + len(gap)
        if text.startswith(gap + answer, len(opening)):
            end = start + len(answer)
            return Span(start, end, end + len(os.path.commonprefix([after, text[end:]])))
    return None


def turn_enders(tokenizer: Any) -> frozenset[int]:
    """Special tokens that may end a turn: all but the one that only begins a text."""
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= set(tokenizer.all_special_ids)
    if tokenizer.bos_token_id != tokenizer.eos_token_id:
        special.discard(tokenizer.bos_token_id)
    return frozenset(special)


def learnt_by_spans(tokenizer: Any, text: str, spans: Sequence[Span]) -> tuple[list[int], list[bool]]:
    """Ids of the rendered text, and for each whether it is learnt: where a span or its end-of-turn token is."""
    if tokenizer.is_fast:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    else:
        ids = encode(tokenizer, text)
        offsets = []
    enders = turn_enders(tokenizer)
    supervised = [False] * len(ids)
    for span in spans:
        if tokenizer.is_fast:
            first, past, limit = _by_offsets(offsets, span)
        else:
            first = _whole_tokens(tokenizer, ids, text[: span.start])
            past = _covering_tokens(tokenizer, ids, text[: span.end])
            limit = _whole_tokens(tokenizer, ids, text[: span.limit])
        past = _with_ender(tokenizer, ids, past, limit, enders)
        supervised[first:past] = [True] * (past - first)
    return ids, supervised


def _by_offsets(offsets: Sequence[tuple[int, int]], span: Span) -> tuple[int, int, int]:
    """Token indices of a span, from each token's characters; a token that straddles an edge is inside."""
    first = next((index for index, (_, end) in enumerate(offsets) if end > span.start), len(offsets))
    past = next((index for index in range(first, len(offsets)) if offsets[index][0] >= span.end), len(offsets))
    limit = next((index for index in range(past, len(offsets)) if offsets[index][0] >= span.limit), len(offsets))
    return first, past, limit


def _whole_tokens(tokenizer: Any, ids: Sequence[int], prefix: str) -> int:
    """How many of `ids` lie wholly in a prefix of their text, for tokenizers that give no offsets."""
    return len(os.path.commonprefix([encode(tokenizer, prefix), list(ids)]))


def _covering_tokens(tokenizer: Any, ids: Sequence[int], prefix: str) -> int:
    """How many of `ids` it takes to cover a prefix of their text: one more when a token straddles its end."""
    whole = _whole_tokens(tokenizer, ids, prefix)
    return whole + (whole < len(encode(tokenizer, prefix)))


def _with_ender(tokenizer: Any, ids: Sequence[int], past: int, limit: int, enders: frozenset[int]) -> int:
    """`past` moved behind the end-of-turn token, if it follows the answer with only blanks between."""
    for index in range(past, limit):
        if ids[index] in enders:
            return index + 1
        if tokenizer.decode([ids[index]]).strip():
            break
    return past


def learnt_by_tags(tokenizer: Any, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
    """Ids and mask from a template's {% generation %} tags, each run stretched over its end-of-turn token."""
    if not tokenizer.is_fast:
        raise BadRow("{% generation %} tags need a fast tokenizer", "messages", hint=UNSTABLE_HINT)
    encoded = tokenizer.apply_chat_template(
        as_dicts(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, supervised = list(encoded["input_ids"]), [bool(learnt) for learnt in encoded["assistant_masks"]]
    enders = turn_enders(tokenizer)
    for index in range(1, len(ids)):
        if supervised[index - 1] and ids[index - 1] not in enders and ids[index] in enders:
            supervised[index] = True
    return ids, supervised
