"""Where the answers are in a rendered chat, and which tokens cover them. This file knows no files and no counts.

It is found by rendering, never by searching: the chat template is rendered up to the answer, and with a marker in the
answer's place. What surrounds the marker surrounds the answer, whatever the answer says or the user quotes.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from medusa_cli.data.conversations import BadRow, Message
from medusa_cli.data.template import MARKER, SILENT_HINT, applied, render

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_UNSTABLE = "the chat template renders an answer differently once the chat goes on"
_UNSTABLE_HINT = "use a template with {% generation %} tags, or one that renders each message the same way everywhere"
_SILENT = "the chat template leaves the assistant's words out"
_ANEW_HINT = "have the model answer itself (--answers-from self): its own answers begin where these words end"


@dataclass(frozen=True)
class Span:
    """An answer in the rendered text: characters start to end; its end-of-turn token starts before `limit`."""

    start: int
    end: int
    limit: int


def encode(tokenizer: Any, rendered: str) -> list[int]:
    """Ids of rendered text, whose special tokens the template has written."""
    return list(tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"])


def answer_spans(tokenizer: Any, messages: Sequence[Message], text: str, *, parts: bool) -> list[Span] | None:
    """Where each answer that is to be learnt is in `text`, or None when the rendering of prefixes doesn't tell."""
    spans = []
    for place in learnt_places(messages):
        span = _answer_span(tokenizer, messages[: place + 1], text, parts=parts)
        if span is None:
            return None
        spans.append(span)
    return spans


def learnt_places(messages: Sequence[Message]) -> list[int]:
    """Which messages are answers to learn."""
    return [
        place for place, one in enumerate(messages) if one.role == "assistant" and one.learnt and one.content.strip()
    ]


def _answer_span(tokenizer: Any, messages: Sequence[Message], text: str, *, parts: bool) -> Span | None:
    """Where the last of `messages`, an answer, is in `text`, which may go on after it."""
    opening = render(tokenizer, messages[:-1], opening=True, parts=parts)
    through = render(tokenizer, messages, opening=False, parts=parts)
    marked = render(tokenizer, [*messages[:-1], Message("assistant", MARKER)], opening=False, parts=parts)
    if MARKER not in marked:
        raise BadRow(_SILENT, "messages", hint=SILENT_HINT)
    if not (text.startswith(opening) and through.startswith(opening) and marked.startswith(opening)):
        return None
    before, marker, after = marked[len(opening) :].partition(MARKER)
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


def why_no_spans(tokenizer: Any, messages: Sequence[Message], *, parts: bool) -> BadRow:
    """Why rendering doesn't show where the answers are."""
    for place in learnt_places(messages):
        before, through = messages[:place], messages[: place + 1]
        said = render(tokenizer, through, opening=False, parts=parts)
        opening = render(tokenizer, before, opening=True, parts=parts)
        history = render(tokenizer, before, opening=False, parts=parts)
        # templates of models that think open the turn with <think>, and forget it once there is an answer
        if said.startswith(history) and opening.startswith(history) and not said.startswith(opening):
            lacking = opening[len(os.path.commonprefix([said, opening])) :]
            return BadRow(
                f"the chat template opens the assistant's turn with {lacking[-60:]!r}, and leaves that out before an "
                "answer that is given",
                "messages",
                hint=_ANEW_HINT,
            )
    return BadRow(_UNSTABLE, "messages", hint=_UNSTABLE_HINT)


def turn_enders(tokenizer: Any, ends: frozenset[int]) -> frozenset[int]:
    """What may end a turn: `ends`, where the model stops, and special tokens, but the one that only begins a text."""
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= set(tokenizer.all_special_ids)
    if tokenizer.bos_token_id != tokenizer.eos_token_id:
        special.discard(tokenizer.bos_token_id)
    return frozenset(special) | ends


def learnt_by_spans(
    tokenizer: Any, text: str, spans: Sequence[Span], enders: frozenset[int]
) -> tuple[list[int], list[bool]]:
    """Ids of the rendered text, and for each whether it is learnt: where a span or the one of `enders` after it is."""
    if tokenizer.is_fast:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    else:
        ids = encode(tokenizer, text)
        offsets = []
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


def learnt_by_tags(
    tokenizer: Any, messages: Sequence[Message], enders: frozenset[int], *, parts: bool
) -> tuple[list[int], list[bool]]:
    """Ids and mask from a template's {% generation %} tags, each run stretched over the one of `enders` after it."""
    if not tokenizer.is_fast:
        raise BadRow("{% generation %} tags need a fast tokenizer", "messages", hint=_UNSTABLE_HINT)
    encoded = applied(
        tokenizer, messages, parts=parts, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, tagged = list(encoded["input_ids"]), [bool(learnt) for learnt in encoded["assistant_masks"]]
    supervised = _of_learnt(messages, tagged)
    for index in range(1, len(ids)):
        if supervised[index - 1] and ids[index - 1] not in enders and ids[index] in enders:
            supervised[index] = True
    return ids, supervised


def _of_learnt(messages: Sequence[Message], tagged: Sequence[bool]) -> list[bool]:
    """The tagged runs, one for each answer that says something, without those of answers that are not to be learnt."""
    said = [message for message in messages if message.role == "assistant" and message.content.strip()]
    if all(message.learnt for message in said):
        return list(tagged)
    runs = [[place for place, _ in run] for learnt, run in groupby(enumerate(tagged), itemgetter(1)) if learnt]
    if len(runs) != len(said):
        raise BadRow("the {% generation %} tags don't show which answer is which", "messages", hint=_UNSTABLE_HINT)
    supervised = [False] * len(tagged)
    for message, run in zip(said, runs, strict=True):
        for place in run:
            supervised[place] = message.learnt
    return supervised
