"""Answers in OpenAI's forms: whole ones, and the chunks of a stream."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from medusa_cli.serve.schema import ChatRequest
from medusa_cli.serve.service import Call
from medusa_cli.serve.worker import Logprob

Words = Callable[[int], str]
"""A token's id to its text."""


def head(call: Call, name: str, *, chunk: bool) -> dict[str, Any]:
    """What every answer begins with."""
    if isinstance(call.wanted, ChatRequest):
        kind = "chat.completion.chunk" if chunk else "chat.completion"
    else:
        kind = "text_completion"
    return {"id": call.id, "object": kind, "created": call.created, "model": name}


def chunk_of(
    call: Call, index: int, text: str, logprobs: Sequence[Logprob] | None, words: Words, *, first: bool
) -> dict[str, Any]:
    """One entry of `choices`: words that have come, and how the text ended if it has."""
    delta = {"role": "assistant", "content": text} if first else {"content": text} if text else {}
    return _entry(call, index, {"delta": delta}, text, _logprobs(call, index, logprobs, words))


def choice_of(call: Call, index: int, text: str, logprobs: Sequence[Logprob] | None, words: Words) -> dict[str, Any]:
    """One entry of `choices` of a whole answer."""
    message = {"role": "assistant", "content": text, "refusal": None}
    return _entry(call, index, {"message": message}, text, _logprobs(call, index, logprobs, words))


def _entry(
    call: Call, index: int, of_chat: dict[str, Any], text: str, logprobs: dict[str, Any] | None
) -> dict[str, Any]:
    body = of_chat if isinstance(call.wanted, ChatRequest) else {"text": text}
    return {"index": index, **body, "logprobs": logprobs, "finish_reason": call.choices[index].finish_reason}


def ended(call: Call) -> dict[str, Any]:
    """What a whole answer, and the last chunk of a stream, say of all of it."""
    return {"usage": call.usage(), "speculation": call.speculation()}


def _logprobs(call: Call, index: int, logprobs: Sequence[Logprob] | None, words: Words) -> dict[str, Any] | None:
    """The chat's form, or the older one of completions, whose places count on from chunk to chunk; None: not asked."""
    if logprobs is None or call.wanted.num_logprobs is None:
        return None
    if isinstance(call.wanted, ChatRequest):
        return {
            "content": [
                {**_token(each.token, each.logprob, words), "top_logprobs": [_token(*top, words) for top in each.top]}
                for each in logprobs
            ],
            "refusal": None,
        }
    texts = [words(each.token) for each in logprobs]
    offsets = list(accumulate(map(len, texts), initial=call.choices[index].told))
    call.choices[index].told = offsets.pop()
    return {
        "tokens": texts,
        "token_logprobs": [each.logprob for each in logprobs],
        "top_logprobs": [{words(token): value for token, value in each.top} for each in logprobs],
        "text_offset": offsets,
    }


def _token(token: int, logprob: float, words: Words) -> dict[str, Any]:
    text = words(token)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
