"""Medusa heads for any Hugging Face causal language model: train them, decode with them, keep every word.

`import medusa_cli as medusa` costs nothing: what is named below is loaded when it is first asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medusa_cli.api import Medusa, Options, Prompt, Reply, attach, load
    from medusa_cli.errors import (
        DataError,
        ExactnessError,
        FormatError,
        HeadsMismatch,
        MedusaError,
        MissingExtra,
        RecipeError,
        TargetError,
        TrainingError,
        TreeError,
    )

__version__ = "0.1.0"

__all__ = [
    "DataError",
    "ExactnessError",
    "FormatError",
    "HeadsMismatch",
    "Medusa",
    "MedusaError",
    "MissingExtra",
    "Options",
    "Prompt",
    "RecipeError",
    "Reply",
    "TargetError",
    "TrainingError",
    "TreeError",
    "attach",
    "load",
]

_API = {"Medusa", "Options", "Prompt", "Reply", "attach", "load"}


def __getattr__(name: str) -> Any:
    """What `__all__` names, from where it lives."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found = getattr(import_module("medusa_cli.api" if name in _API else "medusa_cli.errors"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """All that can be asked for."""
    return sorted({*globals(), *__all__})
