"""Texts about the program made from the program: docs/cli.md, and docs/map.md, each file of the package in one line.

python -m tests.tools.docs_text > docs/cli.md
python -m tests.tools.docs_text map > docs/map.md
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

MAP_INTRODUCTION = """\
# Where things are

Each file and its first line, written by `make docs`. Which room may import which: [architecture.md](architecture.md).
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


def package_map(package: Path = Path(__file__).parents[2] / "medusa_cli") -> str:
    """The text of docs/map.md: the first line of the docstring of each file that has one, room by room."""
    files = sorted(package.rglob("*.py"), key=lambda file: (file.parent, file.name))
    rooms: dict[Path, list[str]] = {}
    for file in files:
        summary = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]
        if summary:
            rooms.setdefault(file.parent.relative_to(package.parent), []).append(f"- `{file.name}`: {summary}")
    sections = [f"## {room}/\n\n" + "\n".join(lines) + "\n" for room, lines in rooms.items()]
    return "\n".join([MAP_INTRODUCTION, *sections])


def _section(title: str, text: str) -> str:
    """A heading and a help text as it is printed, without the spaces that end its lines."""
    lines = "\n".join(line.rstrip() for line in text.splitlines())
    return f"## {title}\n\n```text\n{lines}\n```\n"


if __name__ == "__main__":
    sys.stdout.write(package_map() if sys.argv[1:] == ["map"] else cli_reference())
