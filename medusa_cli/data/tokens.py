"""Conversations as token ids, and which of them are learnt; prompts as token ids.

Learnt are exactly the tokens of the assistant's words and the token that ends each turn; spans.py finds them.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from medusa_cli.data.conversations import BadRow, Conversation, Counts, Message, OnBadRow
from medusa_cli.data.spans import (
    GENERATION_TAG,
    answer_spans,
    encode,
    learnt_by_spans,
    learnt_by_tags,
    turn_enders,
    why_no_spans,
)
from medusa_cli.data.template import render, takes_parts, template_text
from medusa_cli.errors import DataError

# Above this share of learnt tokens no prompt was seen: the data has none, or the roles were misread.
_HIGH_SHARE = 0.98


@dataclass(frozen=True)
class Tokens:
    """Token ids, and for each whether it is learnt (true of a target, not of the position that predicts it).

    `key` is the id of the conversation they came from.
    """

    ids: list[int]
    supervised: list[bool]
    key: str = ""


def tokenize(
    tokenizer: Any,
    conversations: Iterable[Conversation],
    *,
    max_length: int,
    counts: Counts,
    on_bad_row: OnBadRow = "skip",
    ends: frozenset[int] = frozenset(),
) -> Iterator[Tokens]:
    """Samples of at most `max_length` tokens, each with something to learn.

    ends   ids with which the model ends a turn, beside the tokenizer's special tokens

    What is left out or shortened is in `counts`. Raises BadRow for a row the template refuses when `on_bad_row` is
    "fail", and DataError when no sample comes out at all.
    """
    for conversation in conversations:
        try:
            whole = conversation_tokens(tokenizer, conversation, ends)
        except BadRow as fault:
            if on_bad_row == "fail":
                raise
            counts.skip(fault.reason, conversation.place)
            continue
        tokens = Tokens(whole.ids[:max_length], whole.supervised[:max_length], conversation.id)
        if not any(tokens.supervised):
            counts.empty += 1
            reason = "answer beyond the longest length allowed" if any(whole.supervised) else "no answer"
            counts.skip(reason, conversation.place)
            continue
        counts.cut += len(whole.ids) > max_length
        counts.used += 1
        counts.plain += _is_plain(tokenizer, conversation)
        counts.tokens += len(tokens.ids)
        counts.supervised += sum(tokens.supervised)
        yield tokens
    if not counts.used:
        raise DataError(f"0 usable rows; {counts.describe()}", "check the data, the template and --max-seq-length")


def conversation_tokens(tokenizer: Any, conversation: Conversation, ends: frozenset[int] = frozenset()) -> Tokens:
    """All tokens of one conversation up to its last answer.

    Plain text, and any conversation under a tokenizer without a chat template, is tokenised as the tokenizer likes.
    All of it is learnt but its first token and answers that are not to be learnt. Raises BadRow when the template
    refuses the messages, or when its rendering doesn't show where the answers are.
    """
    if _is_plain(tokenizer, conversation):
        return _plain_tokens(tokenizer, conversation)
    messages = conversation.messages
    while messages and messages[-1].role != "assistant":
        messages = messages[:-1]
    if not messages:
        return Tokens([], [])
    enders = turn_enders(tokenizer, ends)
    try:
        parts = takes_parts(tokenizer, messages)
        text = render(tokenizer, messages, opening=False, parts=parts)
        spans = answer_spans(tokenizer, messages, text, parts=parts)
        if spans is not None:
            ids, learnt = learnt_by_spans(tokenizer, text, spans, enders)
        elif GENERATION_TAG.search(template_text(tokenizer)):
            ids, learnt = learnt_by_tags(tokenizer, messages, enders, parts=parts)
        else:
            raise why_no_spans(tokenizer, messages, parts=parts)
    except BadRow as fault:
        raise fault.at(conversation.place) from fault
    if conversation.only_last:
        learnt = _last_run(learnt)
    if conversation.unfinished and messages[-1].learnt and True in learnt:
        last = len(learnt) - 1 - learnt[::-1].index(True)
        learnt[last] = ids[last] not in enders
    return Tokens(ids, learnt)


def prompt_ids(tokenizer: Any, messages: Sequence[Message], *, chat: bool) -> list[int]:
    """The ids to decode from.

    `chat` renders the tokenizer's chat template up to where the assistant speaks; the template writes its own
    special tokens, so none is added (no double BOS). Without `chat`, or without a template, the contents are joined by
    blank lines and tokenised with the special tokens the tokenizer adds; of no text the first token (BOS) is left.
    Raises DataError when the template refuses the messages, or there is nothing to decode from.
    """
    if chat and tokenizer.chat_template:
        try:
            parts = takes_parts(tokenizer, messages)
            ids = encode(tokenizer, render(tokenizer, messages, opening=True, parts=parts))
        except BadRow as fault:
            raise fault.at("the prompt") from fault
    else:
        ids = _plain_ids(tokenizer, messages)
        if not ids and tokenizer.bos_token_id is not None:
            ids = [tokenizer.bos_token_id]
    if not ids:
        raise DataError(
            "the prompt is empty, and the tokenizer names no first token (BOS) to start from",
            "write some text to go on from",
        )
    return ids


def check_share(counts: Counts) -> str | None:
    """A warning when nearly all tokens are learnt, or None; DataError when none is.

    Plain text is learnt whole by intent and brings no warning.
    """
    if not counts.supervised:
        raise DataError(f"0 of {counts.tokens} tokens are answers; {counts.describe()}", "check the roles in the data")
    share = counts.supervised / counts.tokens
    if share > _HIGH_SHARE and not counts.plain:
        return f"{share:.1%} of the tokens are answers: are the prompts missing? see --preview-masks"
    return None


def _is_plain(tokenizer: Any, conversation: Conversation) -> bool:
    """True when there are no roles to render, or nothing to render them with."""
    return not tokenizer.chat_template or conversation.messages[0].role == "text"


def _plain_ids(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """The contents, joined by blank lines, with the tokenizer's own special tokens."""
    return list(tokenizer("\n\n".join(message.content for message in messages), verbose=False)["input_ids"])


def _plain_tokens(tokenizer: Any, conversation: Conversation) -> Tokens:
    """The contents as `_plain_ids`, learnt but for the first token and for messages that are not to be learnt."""
    messages = conversation.messages
    if all(message.learnt for message in messages):
        ids = _plain_ids(tokenizer, messages)
        return Tokens(ids, [index > 0 for index in range(len(ids))])
    if not tokenizer.is_fast:
        raise BadRow("turns that are not to be learnt need a fast tokenizer", "messages").at(conversation.place)
    encoded = tokenizer("\n\n".join(one.content for one in messages), return_offsets_mapping=True, verbose=False)
    starts = [0, *accumulate(len(message.content) + 2 for message in messages)]
    of = [bisect_right(starts, start) - 1 for start, _ in encoded["offset_mapping"]]
    return Tokens(list(encoded["input_ids"]), [index > 0 and messages[place].learnt for index, place in enumerate(of)])


def _last_run(learnt: Sequence[bool]) -> list[bool]:
    """Only the last run of learnt tokens: between two answers there is always a user's turn."""
    past = len(learnt) - learnt[::-1].index(True) if True in learnt else 0
    first = past
    while first and learnt[first - 1]:
        first -= 1
    return [first <= index < past for index in range(len(learnt))]
