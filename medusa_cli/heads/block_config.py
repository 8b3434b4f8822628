"""What block heads are: which of the target's layers they look at, how large their own layers are.

Shape letters: K places of a block, L tapped layers, H hidden.
"""

from typing import Any, ClassVar, Self

from pydantic import Field, field_validator, model_validator

from medusa_cli.config.recipe import HeadsSettings
from medusa_cli.errors import RecipeError
from medusa_cli.heads.config import HeadsConfig

TAPS = 5  # layers looked at where none are named, as far as the target has as many
HEAD_SIZE = 64  # of the block's own attention, where the hidden size allows it


class BlockConfig(HeadsConfig):
    """Heads that are one block: K guesses in one pass, from inner states of the target at every place before.

    num_heads       K: places of the block, the root's included, each of which guesses the token after it
    num_layers      layers of the block's own
    taps            the target's layers whose states it sees, by the numbers of `hidden_states`
    tap_size        width of those states
    query_heads, key_heads, head_size   of its attention
    inner_size      width of its feed-forward layers
    rank            of the table that says what a token brings to the chances of the next
    causal          a place of the block looks only at those before it
    near            the states of the last place before the block go into its queries as well
    rope_theta      base of its rotary positions
    """

    looks_back: ClassVar[bool] = True

    type: str = Field("block", min_length=1, max_length=100)
    num_heads: int = Field(ge=1, le=64)
    num_layers: int = Field(ge=1, le=64)
    sees_root: bool = True
    taps: tuple[int, ...] = Field(min_length=1, max_length=64)
    tap_size: int = Field(ge=1, le=1_000_000)
    query_heads: int = Field(ge=1, le=4096)
    key_heads: int = Field(ge=1, le=4096)
    head_size: int = Field(ge=2, le=4096)
    inner_size: int = Field(ge=1, le=10_000_000)
    rank: int = Field(128, ge=1, le=65_536)
    causal: bool = False
    near: bool = False
    rope_theta: float = Field(10_000.0, ge=1)

    @classmethod
    def of(cls, settings: HeadsSettings, **facts: Any) -> Self:
        """As of all heads; what is not named follows from the target's size."""
        hidden, options = facts["hidden_size"], settings.options
        width = HEAD_SIZE if hidden >= HEAD_SIZE else max(2, hidden // 4 * 2)
        query_heads = int(options.get("query_heads", max(1, round(hidden / width))))
        derived = {
            "taps": spread(facts["num_layers_seen"]),
            "query_heads": query_heads,
            "key_heads": next(query_heads // share for share in (4, 3, 2, 1) if query_heads % share == 0),
            "head_size": width,
            "inner_size": max(8, round(8 * hidden / 3 / 64) * 64),
        }
        found = super().of(settings, **derived, **facts)
        cls.taps_of(settings, facts["num_layers_seen"])
        return found

    @classmethod
    def taps_of(cls, settings: HeadsSettings, num_layers: int) -> tuple[int, ...]:
        """As of all heads. Raises RecipeError for layers that the target hasn't."""
        named = settings.options.get("taps")
        taps = spread(num_layers) if named is None else parse_taps(named)
        strange = [tap for tap in taps if not 0 <= tap <= num_layers]
        if strange:
            raise RecipeError(
                f"heads.options.taps: there is no {strange[0]}; the target has the numbers 0 to {num_layers}",
                "0 stands for the embeddings, the last for what the output sees",
            )
        return taps

    @field_validator("taps", mode="before")
    @classmethod
    def _as_numbers(cls, value: Any) -> Any:
        """Options hold no lists: layers are named by commas there."""
        return parse_taps(value) if isinstance(value, str | int) else value

    @field_validator("taps")
    @classmethod
    def _each_once(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(value)) != len(value):
            raise ValueError("a layer is named twice")
        return value

    @model_validator(mode="after")
    def _can_be_computed(self) -> Self:
        if self.query_heads % self.key_heads:
            raise ValueError(f"{self.query_heads} query_heads can't share {self.key_heads} key_heads")
        if self.head_size % 2:
            raise ValueError(f"head_size {self.head_size} is odd, and positions turn pairs of numbers")
        if self.own_output:
            raise ValueError("block heads share the target's output: own_output can't be true")
        if not self.sees_root:
            raise ValueError("block heads see the root: sees_root can't be false")
        return self

    @property
    def states_width(self) -> int:
        """Numbers of a place's states, of all taps."""
        return len(self.taps) * self.tap_size

    @property
    def wanted_taps(self) -> tuple[int, ...]:
        """The layers."""
        return self.taps


def spread(num_layers: int) -> tuple[int, ...]:
    """Layers spread over the depth of a model, from the output of its second to that of its third last."""
    first = min(2, max(num_layers - 1, 0))
    last = max(num_layers - 2, first)
    steps = [first + (last - first) * place / (TAPS - 1) for place in range(TAPS)]
    return tuple(dict.fromkeys(int(step + 0.5) for step in steps))


def parse_taps(value: Any) -> tuple[int, ...]:
    """Layers named by commas. Raises RecipeError."""
    try:
        return tuple(int(part) for part in str(value).split(","))
    except ValueError:
        raise RecipeError(
            f"heads.options.taps: {value!r} names no layers", "write numbers by commas, such as 2,9,16"
        ) from None
