"""Import an optional package by name, or say which extra brings it."""

import importlib
from types import ModuleType

from medusa_cli.errors import MissingExtra
from medusa_cli.util.pip_hints import extra_hint


def need(module: str, extra: str) -> ModuleType:
    """The imported `module`; MissingExtra names the `extra` of this distribution that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise MissingExtra(
            f"this needs the package '{error.name}', which is not installed",
            extra_hint(extra),
        ) from error
