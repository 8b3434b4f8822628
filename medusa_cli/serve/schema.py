"""Requests of the OpenAI API as typed models. What is not done here is refused by name; unknown fields are too."""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from medusa_cli.data.conversations import Message, is_text
from medusa_cli.serve.errors import ApiError, unsupported

MOST_CHOICES = 16
MOST_STOPS = 4
MOST_LOGPROBS = 20
MOST_FIELDS = 100  # of one object
MOST_NOTES = 1000  # entries of metadata

_T = TypeVar("_T")


def _as_text(text: str) -> str:
    if not is_text(text):
        raise ValueError("holds halves of characters")
    return text


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise ValueError("must be a finite number")
    return number


Text = Annotated[str, AfterValidator(_as_text)]
Number = Annotated[float, AfterValidator(_finite)]
# ends at the first fault: a sentence for each of a million would keep everybody waiting
Listed = Annotated[list[_T], Field(fail_fast=True)]


def _at_most(most: int, value: Any) -> Any:
    """The value, before its entries are looked at."""
    if isinstance(value, dict | list) and len(value) > most:
        raise ValueError(f"holds {len(value)} entries, and {most} are allowed")
    return value


def _first_wrong(given: Any) -> Any:
    """The biases; where some are none, the first of these alone, as a mapping's faults are all looked for else."""
    for token, bias in given.items() if isinstance(given, dict) else ():
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            return {token: bias}
    return given


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _few(cls, value: Any) -> Any:
        return _at_most(MOST_FIELDS, value)


_Biases = dict[str, Annotated[Number, Field(ge=-100, le=100)]]


class StreamOptions(_Model):
    """What a stream holds beside the text."""

    include_usage: bool = False
    include_steps: bool = False


class Wanted(_Model):
    """What both kinds of requests may ask for.

    Beside OpenAI's fields: `top_k`, `min_p`, `repetition_penalty`, `ignore_eos`, and `speculate`: whether tokens may be
    guessed ahead, which changes no text.
    """

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[Number, Field(gt=0)] | None = None
    logit_bias: Annotated[_Biases, BeforeValidator(_first_wrong)] | None = None
    seed: int | None = None
    stop: Text | Listed[Text] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    ignore_eos: bool = False
    user: str | None = None
    metadata: Annotated[dict[str, str] | None, BeforeValidator(partial(_at_most, MOST_NOTES))] = None
    speculate: bool = True

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end a text."""
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def budget(self) -> int | None:
        """New tokens at most, if the request says."""
        return self.max_tokens

    @property
    def num_texts(self) -> int:
        """Texts that are asked for."""
        return self.n

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to be told at each place beside the chosen one; None: no logprobs are asked for."""
        raise NotImplementedError

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with what was used."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def includes_steps(self) -> bool:
        """Whether a stream says which step brought what."""
        return self.stream_options is not None and self.stream_options.include_steps

    @model_validator(mode="after")
    def _together(self) -> Self:
        if not all(self.stops) or len(self.stops) > MOST_STOPS:
            raise ValueError(f"stop must be one to {MOST_STOPS} strings that are not empty")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed where stream is true")
        return self


class TextPart(_Model):
    """A part of a message."""

    type: Literal["text"]
    text: Text


class ChatMessage(_Model):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Listed[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None

    def message(self) -> Message:
        """As the model's template takes it."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts or ())
        return Message("system" if self.role == "developer" else self.role, text)


class ChatRequest(Wanted):
    """POST /v1/chat/completions."""

    messages: Annotated[Listed[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    @property
    def budget(self) -> int | None:
        """The newer field counts where both are given."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """As `Wanted`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is only allowed where logprobs is true")
        return self


_Id = Annotated[int, Field(ge=0)]


class CompletionRequest(Wanted):
    """POST /v1/completions."""

    prompt: Text | Listed[Text] | Listed[_Id] | Listed[Listed[_Id]]
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """As `Wanted`."""
        return self.logprobs

    @property
    def num_texts(self) -> int:
        """As `Wanted`: each prompt `n` times."""
        return len(self.prompts) * self.n

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Each of them as text or as ids."""
        given: Any = self.prompt
        if isinstance(given, str):
            return [given]
        return [given] if given and isinstance(given[0], int) else given

    @model_validator(mode="after")
    def _some(self) -> Self:
        if not self.prompts or not all(self.prompts):
            raise ValueError("prompt is empty")
        return self


# fields that are taken where they ask for nothing, and refused by name else
_IDLE: Mapping[str, tuple[Any, ...]] = {
    "tools": (None, []), "tool_choice": (None, "none", "auto"), "parallel_tool_calls": (None, True, False),
    "functions": (None, []), "function_call": (None, "none", "auto"), "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]), "audio": (None,), "prediction": (None,), "store": (None, False),
    "service_tier": (None, "auto", "default"), "reasoning_effort": (None,), "web_search_options": (None,),
    "verbosity": (None,), "echo": (None, False), "suffix": (None, ""), "best_of": (None, 1),
}  # fmt: skip
_REFUSED_PARTS = ("image_url", "input_audio", "file", "video_url")


def parsed(kind: type[Wanted], document: Any) -> Any:
    """A request from its JSON. Raises ApiError."""
    if not isinstance(document, dict):
        raise ApiError(400, "the body must be a JSON object")
    for name, idle in _IDLE.items():
        if name in document and document[name] not in idle:
            raise unsupported(name, name)
    for place in _parts_of(document):
        raise unsupported("messages", f"a message with {place}")
    asked = {name: value for name, value in document.items() if name not in _IDLE}
    try:
        return kind.model_validate(asked)
    except ValidationError as error:
        raise _told(error) from error


def _parts_of(document: Mapping[str, Any]) -> Iterator[str]:
    """What messages hold that is no text."""
    messages = document.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict):
            continue
        if message.get("tool_calls") or message.get("function_call"):
            yield "tool calls"
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and part.get("type") in _REFUSED_PARTS:
                yield str(part["type"])


def _told(error: ValidationError) -> ApiError:
    """The first fault, by the name of its field."""
    fault = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in fault["loc"] if not (isinstance(part, str) and "[" in part))
    if fault["type"] == "extra_forbidden":
        return ApiError(400, f"unrecognized parameter: {where}", where, "unknown_parameter")
    if fault["type"] == "missing":
        return ApiError(400, f"you must provide {where}", where, "missing_required_parameter")
    message = fault["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{where}: {message}" if where else message, where or None, "invalid_value")
