"""Import an optional package by name, or say which extra brings it, in a pip command that works as it is printed."""

import importlib
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from types import ModuleType

from medusa_cli.errors import MissingExtra

DISTRIBUTION = "medusa-heads"
CLONE = Path(__file__).parents[2]


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


def extra_hint(extra: str, clone: Path = CLONE) -> str:
    """How to install an extra: from the clone, or for an installed wheel, which no index has, the packages it holds."""
    if (clone / "pyproject.toml").is_file():
        where = "." if clone == Path.cwd() else str(clone)
        return f"pip install -e '{where}[{extra}]'"
    return f"pip install {' '.join(shlex.quote(package) for package in packages_of(extra))}"


def packages_of(extra: str) -> list[str]:
    """What the installed distribution asks for under an extra; the extra's own name where nothing is known of it."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        listed = [line.partition(";") for line in requires(DISTRIBUTION) or ()]
    except PackageNotFoundError:
        listed = []
    wanted = re.compile(rf"extra\s*==\s*['\"]{re.escape(extra)}['\"]")
    return [package.strip() for package, _, marker in listed if wanted.search(marker)] or [extra]


def with_this_pip(hint: str) -> str:
    """The hint with `pip` as this interpreter's, where the one on the PATH would install into another environment."""
    if "pip install" not in hint or _pip_on_path_is_ours():
        return hint
    program = os.path.relpath(sys.executable) if sys.executable.startswith(f"{Path.cwd()}/") else sys.executable
    return hint.replace("pip install", f"{shlex.quote(program)} -m pip install")


def _pip_on_path_is_ours() -> bool:
    found = shutil.which("pip")
    return found is not None and Path(found).parent == Path(sys.executable).parent
