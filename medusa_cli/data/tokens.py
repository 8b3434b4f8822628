"""Conversations as token ids, and which of them are learnt; prompts as token ids.

Learnt are exactly the tokens of the assistant's words and the token that ends each turn. Where they are is found by
rendering, never by searching: the chat template is rendered up to the answer, and with a marker in the answer's
place. What surrounds the marker surrounds the answer, whatever the answer says or the user quotes.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateError

from medusa_cli.data.conversations import BadRow, Conversation, Counts, Message, OnBadRow
from medusa_cli.errors import DataError

_MARKER = "\ue000\ue001\ue000"
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_UNSTABLE = "the chat template renders an answer differently once the chat goes on"
_UNSTABLE_HINT = "use a template with {% generation %} tags, or one that renders each message the same way everywhere"
# Above this share of learnt tokens no prompt was seen: the data has none, or the roles were misread.
_HIGH_SHARE = 0.98


@dataclass(frozen=True)
class Tokens:
    """Token ids, and for each whether it is learnt (true of a target, not of the position that predicts it)."""

    ids: list[int]
    supervised: list[bool]


@dataclass(frozen=True)
class _Span:
    """An answer in the rendered text: characters start to end; its end-of-turn token starts before `limit`."""

    start: int
    end: int
    limit: int


def tokenize(
    tokenizer: Any,
    conversations: Iterable[Conversation],
    *,
    max_length: int,
    counts: Counts,
    on_bad_row: OnBadRow = "skip",
) -> Iterator[Tokens]:
    """Samples of at most `max_length` tokens, each with something to learn.

    What is left out or shortened is in `counts`. Raises BadRow for a row the template refuses when `on_bad_row` is
    "fail", and DataError when no sample comes out at all.
    """
    for conversation in conversations:
        try:
            whole = conversation_tokens(tokenizer, conversation)
        except BadRow as fault:
            if on_bad_row == "fail":
                raise
            counts.skip(fault.reason, conversation.place)
            continue
        tokens = Tokens(whole.ids[:max_length], whole.supervised[:max_length])
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


def conversation_tokens(tokenizer: Any, conversation: Conversation) -> Tokens:
    """All tokens of one conversation up to its last answer.

    Plain text, and any conversation under a tokenizer without a chat template, is tokenised as the tokenizer
    likes, and all but the first token is learnt. Raises BadRow when the template refuses the messages, or when
    its rendering doesn't show where the answers are.
    """
    if _is_plain(tokenizer, conversation):
        ids = _plain_ids(tokenizer, conversation.messages)
        return Tokens(ids, [index > 0 for index in range(len(ids))])
    messages = conversation.messages
    while messages and messages[-1].role != "assistant":
        messages = messages[:-1]
    if not messages:
        return Tokens([], [])
    try:
        text = _render(tokenizer, messages, opening=False)
        spans = _answer_spans(tokenizer, messages, text)
        if spans is not None:
            return _spans_to_tokens(tokenizer, text, spans)
        if _GENERATION_TAG.search(tokenizer.get_chat_template()):
            return _from_generation_tags(tokenizer, messages)
        raise BadRow(_UNSTABLE, "messages", hint=_UNSTABLE_HINT)
    except BadRow as fault:
        raise fault.at(conversation.place) from fault


def prompt_ids(tokenizer: Any, messages: Sequence[Message], *, chat: bool) -> list[int]:
    """The ids to decode from.

    `chat` renders the tokenizer's chat template up to where the assistant speaks; the template writes its own
    special tokens, so none is added (no double BOS). Without `chat`, or without a template, the contents are joined by
    blank lines and tokenised with the special tokens the tokenizer adds. Raises DataError when the template
    refuses the messages, or nothing is left to decode from.
    """
    if chat and tokenizer.chat_template:
        try:
            ids = _encode(tokenizer, _render(tokenizer, messages, opening=True))
        except BadRow as fault:
            raise fault.at("the prompt") from fault
    else:
        ids = _plain_ids(tokenizer, messages)
    if not ids:
        raise DataError("the prompt is empty", "say something, or use a chat template (--chat)")
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


def _encode(tokenizer: Any, rendered: str) -> list[int]:
    """Ids of rendered text, whose special tokens the template has written."""
    return list(tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"])


def _as_dicts(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Messages as a chat template takes them."""
    return [{"role": message.role, "content": message.content} for message in messages]


def _render(tokenizer: Any, messages: Sequence[Message], *, opening: bool) -> str:
    """The chat template's text; `opening` adds the words that open the assistant's turn."""
    try:
        return str(
            tokenizer.apply_chat_template(
                _as_dicts(messages), tokenize=False, add_generation_prompt=opening, return_dict=False
            )
        )
    except TemplateError as error:
        raise BadRow(
            f"the chat template refuses it ({error})", "messages", hint="the model takes no such sequence of roles"
        ) from error


def _answer_spans(tokenizer: Any, messages: Sequence[Message], text: str) -> list[_Span] | None:
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


def _answer_span(tokenizer: Any, messages: Sequence[Message], text: str) -> _Span | None:
    """Where the last of `messages`, an answer, is in `text`, which may go on after it."""
    opening = _render(tokenizer, messages[:-1], opening=True)
    through = _render(tokenizer, messages, opening=False)
    marked = _render(tokenizer, [*messages[:-1], Message("assistant", _MARKER)], opening=False)
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
            return _Span(start, end, end + len(os.path.commonprefix([after, text[end:]])))
    return None


def _turn_enders(tokenizer: Any) -> frozenset[int]:
    """Special tokens that may end a turn: all but the one that only begins a text."""
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= set(tokenizer.all_special_ids)
    if tokenizer.bos_token_id != tokenizer.eos_token_id:
        special.discard(tokenizer.bos_token_id)
    return frozenset(special)


def _spans_to_tokens(tokenizer: Any, text: str, spans: Sequence[_Span]) -> Tokens:
    """Ids of the rendered text, learnt where a span or its end-of-turn token is."""
    if tokenizer.is_fast:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    else:
        ids = _encode(tokenizer, text)
        offsets = []
    enders = _turn_enders(tokenizer)
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
    return Tokens(ids, supervised)


def _by_offsets(offsets: Sequence[tuple[int, int]], span: _Span) -> tuple[int, int, int]:
    """Token indices of a span, from each token's characters; a token that straddles an edge is inside."""
    first = next((index for index, (_, end) in enumerate(offsets) if end > span.start), len(offsets))
    past = next((index for index in range(first, len(offsets)) if offsets[index][0] >= span.end), len(offsets))
    limit = next((index for index in range(past, len(offsets)) if offsets[index][0] >= span.limit), len(offsets))
    return first, past, limit


def _whole_tokens(tokenizer: Any, ids: Sequence[int], prefix: str) -> int:
    """How many of `ids` lie wholly in a prefix of their text, for tokenizers that give no offsets."""
    return len(os.path.commonprefix([_encode(tokenizer, prefix), list(ids)]))


def _covering_tokens(tokenizer: Any, ids: Sequence[int], prefix: str) -> int:
    """How many of `ids` it takes to cover a prefix of their text: one more when a token straddles its end."""
    whole = _whole_tokens(tokenizer, ids, prefix)
    return whole + (whole < len(_encode(tokenizer, prefix)))


def _with_ender(tokenizer: Any, ids: Sequence[int], past: int, limit: int, enders: frozenset[int]) -> int:
    """`past` moved behind the end-of-turn token, if it follows the answer with only blanks between."""
    for index in range(past, limit):
        if ids[index] in enders:
            return index + 1
        if tokenizer.decode([ids[index]]).strip():
            break
    return past


def _from_generation_tags(tokenizer: Any, messages: Sequence[Message]) -> Tokens:
    """Ids and mask from a template's {% generation %} tags, each run stretched over its end-of-turn token."""
    if not tokenizer.is_fast:
        raise BadRow("{% generation %} tags need a fast tokenizer", "messages", hint=_UNSTABLE_HINT)
    encoded = tokenizer.apply_chat_template(
        _as_dicts(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, supervised = list(encoded["input_ids"]), [bool(learnt) for learnt in encoded["assistant_masks"]]
    enders = _turn_enders(tokenizer)
    for index in range(1, len(ids)):
        if supervised[index - 1] and ids[index - 1] not in enders and ids[index] in enders:
            supervised[index] = True
    return Tokens(ids, supervised)
