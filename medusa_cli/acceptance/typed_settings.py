"""Types of the settings that a model's generation_config may bring, and a trial of what they make of logits.

The library checks some when a processor is made and some when it first runs; what it doesn't check fails anywhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from medusa_cli.acceptance.logits_processors import Shaping
from medusa_cli.errors import RecipeError

_HINT = "mend the model's generation_config.json"
_Id = Annotated[int, Field(ge=0, lt=2**31)]
_Count = Annotated[int, Field(ge=0, lt=2**31)]
_Real = Annotated[float, Field(allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Penalty = Annotated[float, Field(gt=0, le=1e9)]
_as_tuple = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)  # JSON has lists alone


class _Settings(BaseModel):
    """Each by the name that the library gives it."""

    model_config = ConfigDict(strict=True, extra="forbid")

    sequence_bias: list[Annotated[tuple[list[_Id], _Real], _as_tuple]] | dict[tuple[_Id, ...], _Real] | None = None
    encoder_repetition_penalty: _Penalty | None = None
    repetition_penalty: _Penalty | None = None
    no_repeat_ngram_size: _Count | None = None
    encoder_no_repeat_ngram_size: _Count | None = None
    bad_words_ids: list[list[_Id]] | None = None
    min_length: _Count | None = None
    min_new_tokens: _Count | None = None
    forced_bos_token_id: _Id | None = None
    forced_eos_token_id: _Id | list[_Id] | None = None
    remove_invalid_values: bool | None = None
    exponential_decay_length_penalty: Annotated[tuple[_Count, _Penalty], _as_tuple] | None = None
    suppress_tokens: list[_Id] | None = None
    begin_suppress_tokens: list[_Id] | None = None
    top_h: _Share | None = None
    top_k: _Count | None = None
    top_p: _Share | None = None
    min_p: _Share | None = None
    typical_p: _Share | None = None
    epsilon_cutoff: _Share | None = None
    eta_cutoff: _Share | None = None
    renormalize_logits: bool | None = None


def check_types(settings: Mapping[str, Any]) -> None:
    """Raise RecipeError naming the first setting whose value is of another type, or out of its range."""
    try:
        _Settings.model_validate(settings)
    except ValidationError as error:
        fault = error.errors()[0]
        name = str(fault["loc"][0]) if fault["loc"] else "a setting"
        value = f"{settings.get(name)!r:.60}"
        raise RecipeError(f"the model's generation_config: {name} is {value}: {fault['msg']}", _HINT) from error


@dataclass(frozen=True)
class _Row:
    """A text with a prompt of one token."""

    tokens: Sequence[int] = (0,)
    prompt_tokens: int = 1
    most_tokens: int = 2


def try_out(shaping: Shaping, vocab_size: int, device: torch.device) -> None:
    """Rework logits once. Raises RecipeError for settings that don't fit this vocabulary."""
    try:
        shaping.first(torch.zeros(1, vocab_size, device=device), [_Row()])
    except (ValueError, TypeError, LookupError, RuntimeError) as error:
        told = " ".join(str(error).split())[:200]
        raise RecipeError(f"the model's generation_config can't be followed: {told}", _HINT) from error
