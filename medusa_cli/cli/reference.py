"""Texts about the program made from the program: docs/cli.md, and the map of the package.

python -m medusa_cli.cli.reference > docs/cli.md
python -m medusa_cli.cli.reference map
"""

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

from medusa_cli.cli.app import COMMANDS, make_app

WIDTH = 100

INTRODUCTION = """\
# The command line

What `--help` says, written by `make docs`. Where another program is called `medusa`, say `python -m medusa_cli`.
"""


def cli_reference(commands: Iterable[str] = COMMANDS) -> str:
    """The text of docs/cli.md: the help of `medusa` and of each command, at a fixed width."""
    root: Any = typer.main.get_command(make_app(commands))
    context = root.context_class(root, info_name="medusa", terminal_width=WIDTH, **root.context_settings)
    return "\n".join([INTRODUCTION, *_sections(root, context)])


def _sections(command: Any, context: Any) -> Iterator[str]:
    """The help of a command, and of those it is a group of."""
    yield _section(context.command_path, command.get_help(context))
    for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
        inner = command.get_command(context, name)
        yield from _sections(inner, inner.context_class(inner, info_name=name, parent=context, terminal_width=WIDTH))


def package_map(package: Path = Path(__file__).parents[1]) -> Iterator[str]:
    """A line for each folder and each file that says something: indented name, then the first line of its docstring."""
    for file in sorted(package.rglob("*.py"), key=lambda file: (file.parent, file.name != "__init__.py", file.name)):
        place = file.relative_to(package.parent)
        indent = "  " * (len(place.parts) - 1)
        summary = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]
        name = f"{indent[2:]}{place.parent.name}/" if file.name == "__init__.py" else f"{indent}{file.name}"
        yield f"{name:<28}  {summary}".rstrip()


def _section(title: str, text: str) -> str:
    """A heading and a help text as it is printed, without the spaces that end its lines."""
    lines = "\n".join(line.rstrip() for line in text.splitlines())
    return f"## {title}\n\n```text\n{lines}\n```\n"


if __name__ == "__main__":
    sys.stdout.write("\n".join(package_map()) + "\n" if sys.argv[1:] == ["map"] else cli_reference())
