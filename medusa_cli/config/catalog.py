"""The recipes that come with the package: where they are, their names, and what their headers say.

A header is the comment a recipe begins with: sentences on what it makes, then lines of `Name: text`, each of which may
go on in lines that are indented below it.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from medusa_cli.errors import RecipeError

PACKAGE = Path(__file__).parents[1]
FIELDS = ("hardware", "cost", "command", "result")


@dataclass(frozen=True)
class Header:
    """What a recipe makes, and what it needs, costs, is run with and gave; None where the header doesn't say."""

    what: str
    hardware: str | None
    cost: str | None
    command: str | None
    result: str | None


def recipes(package: Path = PACKAGE) -> Mapping[str, Path]:
    """Name -> file, sorted: those inside an installed package, or in the folder beside it in a clone."""
    for folder in (package / "recipes", package.parent / "recipes"):
        if found := sorted(folder.glob("*.yaml"), key=lambda file: file.stem):
            return {file.stem: file for file in found}
    return {}


def find_recipe(name: str, package: Path = PACKAGE) -> Path:
    """The file of this path, else the recipe of this name. Raises RecipeError naming the nearest."""
    if name and Path(name).is_file():
        return Path(name)
    known = recipes(package)
    if name in known:
        return known[name]
    near = nearest_recipe(name, package)
    raise RecipeError(
        f"no such file, and no recipe of that name: {name or 'the name is empty'}",
        f"did you mean {near}? see medusa recipes ls" if near else "see medusa recipes ls",
    )


def nearest_recipe(name: str, package: Path = PACKAGE) -> str | None:
    """The recipe whose name is spelt most alike."""
    near = difflib.get_close_matches(Path(name).name.removesuffix(".yaml").lower(), recipes(package), n=1)
    return near[0] if near else None


def read_header(text: str) -> Header:
    """The header of a recipe's text; empty where it begins with no comment."""
    what: list[str] = []
    found: dict[str, str] = {}
    name = None
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        said = line[1:].removeprefix(" ").rstrip()
        field = re.match(r"([A-Z][a-z]+):\s+(.*)", said)
        if field and field[1].lower() in FIELDS:
            name = field[1].lower()
            found[name] = field[2]
        elif name and said.startswith(" "):
            found[name] += " " + said.strip()
        else:
            name = None
            what.append(said)
    return Header(" ".join(what).strip(), **{field: found.get(field) for field in FIELDS})
