"""Settings: the base of all that a recipe holds, strict about names and numbers. It knows no setting."""

from contextlib import suppress
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

LARGEST = 2**63 - 1  # what 64 bits count to; float32, in which heads learn, has room for products of two such numbers


class Settings(BaseModel):
    """Base of all settings: unknown names are faults, and settings don't change once made.

    A field's title is the help of its flag; its description says more than that and the name do.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _as_yaml_means_it(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML 1.1 reads 1e-4 as text, yes as true, and a section whose lines are comments as nothing."""
        kind = cls.model_fields[str(info.field_name)].annotation
        if value is None and isinstance(kind, type) and issubclass(kind, Settings):
            return {}
        if isinstance(value, bool) and _takes(kind, int, float):
            raise PydanticCustomError("int_type" if _takes(kind, int) else "float_type", "no number")
        if isinstance(value, str) and _takes(kind, int) and "e" in value.lower():
            with suppress(ValueError):
                return float(value)
        return value

    @field_validator("*")
    @classmethod
    def _can_be_computed_with(cls, value: Any) -> Any:
        """A number that overflows where it is used is told here, by its name."""
        if isinstance(value, int | float) and value > LARGEST:
            raise PydanticCustomError("too_large", "larger than 64 bits count to")
        return value


def _takes(kind: Any, *wanted: type) -> bool:
    """Whether a setting of this annotation holds one of these types."""
    return kind in wanted or any(part in wanted for part in get_args(kind))
