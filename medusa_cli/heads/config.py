"""What heads are, which target they were trained for, and whether a target is the one.

Shape letters: K heads, H hidden, P pairs of a head and a guess it sees, V rows of the target's output matrix, W draft
vocabulary.
"""

import logging
from typing import Any, ClassVar, Protocol, Self

import torch
from pydantic import Field, ValidationError, model_validator
from torch import Tensor

from medusa_cli.config.recipe import HeadsSettings
from medusa_cli.config.settings import Settings
from medusa_cli.errors import HeadsMismatch, RecipeError
from medusa_cli.heads.traits import Traited, Traits, differences, traits_of

logger = logging.getLogger(__name__)
UNKNOWN = ""  # the fingerprint of a target that another tool's files don't tell; formats/foreign finds it


class HeadsConfig(Settings):
    """What heads of any kind are and which target they were trained for.

    type          the name of their kind (config/parts.py)
    vocab_size    V: rows of the target's output matrix, padding rows included
    draft_vocab   W: entries of the draft vocabulary; at most V
    own_output    each head has a trained output matrix; otherwise all share the target's rows, which are not stored
    sees_root     the heads also see the root, as its row of the target's output matrix
    output_bias   the output has a bias (some targets' output does)
    adapter       fingerprint of the adapter that the target needs to be the one they were trained for; None: none
    traits        the target's tokenizer, template, rope and rows as they were; None: heads of a version before
    """

    sees_path: ClassVar[bool] = False  # whether a head also sees the guesses before its own
    looks_back: ClassVar[bool] = False  # whether they see inner states of the target at every place before

    type: str = Field(min_length=1, max_length=100)
    num_heads: int = Field(ge=1, le=1_000)
    hidden_size: int = Field(ge=1, le=1_000_000)
    vocab_size: int = Field(ge=1, le=100_000_000)
    draft_vocab: int = Field(ge=1, le=100_000_000)
    own_output: bool
    output_bias: bool
    sees_root: bool = False
    target_name: str
    target_fingerprint: str
    adapter: str | None = None
    traits: Traits | None = None

    @classmethod
    def of(cls, settings: HeadsSettings, **facts: Any) -> Self:
        """What heads of these settings are; facts: the target's, by name. Raises RecipeError for what they can't be."""
        if unknown := [f"heads.options.{name}" for name in settings.options if name not in cls.model_fields]:
            raise RecipeError(f"{settings.type} heads have no setting {', '.join(unknown)}", "leave it out")
        asked = {**dict(settings), **facts, **settings.options}
        try:
            return cls(**{name: value for name, value in asked.items() if name in cls.model_fields})
        except ValidationError as error:
            fault = error.errors()[0]
            name = ".".join(map(str, fault["loc"])) or "type"
            section = "heads.options" if name in settings.options else "heads"
            raise RecipeError(f"{section}.{name}: {fault['msg']}", f"change it for {settings.type} heads") from error

    @classmethod
    def taps_of(cls, settings: HeadsSettings, num_layers: int) -> tuple[int, ...]:
        """The layers that heads of these settings will look at, in a target of so many."""
        return ()

    @property
    def wanted_taps(self) -> tuple[int, ...]:
        """The target's layers whose states they see at every place; () for none."""
        return ()

    @property
    def num_inputs(self) -> int:
        """Vectors of hidden_size that a head sees: the hidden state, the root, the guesses after it."""
        return 1 + (self.num_heads if self.sees_path else self.sees_root)

    @model_validator(mode="after")
    def _draft_vocab_fits(self) -> Self:
        if self.draft_vocab > self.vocab_size:
            raise ValueError(f"draft_vocab {self.draft_vocab} is larger than the target's vocab_size {self.vocab_size}")
        return self


class MedusaConfig(HeadsConfig):
    """Heads of residual blocks."""

    type: str = Field("medusa", min_length=1, max_length=100)
    num_layers: int = Field(ge=1, le=1_000)

    @property
    def num_pairs(self) -> int:
        """P: head k sees the k guesses before its own, if it sees any."""
        return self.num_heads * (self.num_heads - 1) // 2 if self.sees_path else 0

    @model_validator(mode="after")
    def _a_path_begins_with_the_root(self) -> Self:
        if self.sees_path and not self.sees_root:
            raise ValueError(f"{self.type} heads see the root: sees_root can't be false")
        return self


class HydraConfig(MedusaConfig):
    """Heads of residual blocks that also see the guesses before theirs."""

    sees_path: ClassVar[bool] = True

    type: str = Field("hydra", min_length=1, max_length=100)


class HeadsTarget(Traited, Protocol):
    """What heads need to know of a target. `output_bias` is only read by heads whose output has one."""

    @property
    def fingerprint(self) -> str:
        """A short hash of the weights' identity."""

    @property
    def hidden_size(self) -> int:
        """H."""

    @property
    def vocab_size(self) -> int:
        """V."""

    @property
    def real_vocab(self) -> int:
        """Ids the tokenizer knows."""

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and hidden states."""

    @property
    def device(self) -> torch.device:
        """Where inputs go."""

    @property
    def output_weight(self) -> Tensor:
        """The output matrix [V, H]."""

    @property
    def output_bias(self) -> Tensor | None:
        """The output's bias [V], or None."""


def check_belongs(config: HeadsConfig, target: HeadsTarget) -> None:
    """Raise HeadsMismatch, saying what differs, unless heads of this config were trained for this target.

    What makes guesses worse and not wrong is a warning. Heads of another tool are compared where they are adopted.
    """
    if config.target_fingerprint == UNKNOWN:
        return
    hint = f"these heads belong to {config.target_name}: load that model, or train heads for this one"
    for what, ours, theirs in (
        ("a hidden size of", config.hidden_size, target.hidden_size),
        ("a vocabulary of", config.vocab_size, target.vocab_size),
        ("weights with the fingerprint", config.target_fingerprint, target.fingerprint),
    ):
        if ours != theirs:
            raise HeadsMismatch(f"the heads need {what} {ours}; {target.name} has {theirs}", hint)
    if config.traits is None:
        return
    now = traits_of(target, config.traits)
    if None not in (config.traits.words, now.words) and config.traits.words != now.words:
        raise HeadsMismatch(
            f"the heads were trained with another vocabulary: {target.name}'s tokenizer gives ids other words",
            f"use the tokenizer that came with {config.target_name}, or train heads for this one",
        )
    if found := differences(config.traits, now):
        logger.warning(
            "%s has changed since these heads were trained: another %s; they may guess worse", target.name,
            ", another ".join(found),
        )  # fmt: skip
