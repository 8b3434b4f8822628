"""The documents say what is there: commands parse, targets and paths exist, the map and the layers are the code's."""

import ast
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from medusa_cli.cli.app import COMMANDS, make_app
from tests.test_layers import LAYERS
from tests.tools.docs_text import package_map

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "medusa_cli"
WRITTEN_BY_HAND = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(file for file in sorted((ROOT / "docs").glob("*.md")) if file.name not in ("cli.md", "log.md", "map.md")),
]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def shell_lines(text: str) -> Iterator[list[str]]:
    """The words of each line of the blocks of plain text; comments and a leading NAME=value are left out."""
    for language, block in FENCED.findall(text):
        for line in block.splitlines() if language in ("", "sh") else ():
            if not line.startswith(("medusa ", "python -m medusa_cli", "MEDUSA_", "make", "pip ")):
                continue
            words = shlex.split(line, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words = words[1:]
            yield words


def medusa_lines(text: str) -> list[list[str]]:
    """The arguments of each `medusa ...` line."""
    return [words[1:] for words in shell_lines(text) if words[0] == "medusa"]


def demo_lines() -> list[list[str]]:
    """The arguments of each medusa command of `make demo`."""
    recipe = re.search(r"^demo:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert recipe
    return [shlex.split(line)[1:] for line in recipe[1].splitlines() if "$(MEDUSA)" in line]


def quoted() -> list[Any]:
    """Every command that a document, a recipe or the demo quotes."""
    found = [(file, args) for file in WRITTEN_BY_HAND for args in medusa_lines(file.read_text(encoding="utf-8"))]
    found += [(ROOT / "Makefile", args) for args in demo_lines()]
    for file in sorted((ROOT / "recipes").glob("*.yaml")):
        command = re.search(r"^# Command: +medusa (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
        assert command, f"{file.name} names the command that runs it"
        found.append((file, shlex.split(command[1])))
    return [pytest.param(args, id=f"{file.name}: {' '.join(args)}") for file, args in found]


def parsed(args: list[str]) -> Any:
    """The context of the command that a line calls: flags are parsed and their values checked; nothing runs."""
    command: Any = typer.main.get_command(make_app(COMMANDS))
    context = command.context_class(command, info_name="medusa")
    while hasattr(command, "commands"):
        name, *args = args
        command = command.get_command(context, name)
        assert command, f"no such command: {name}"
        if not hasattr(command, "commands"):
            return command.make_context(name, args, parent=context)
        context = command.context_class(command, info_name=name, parent=context)
    raise AssertionError("a group is no command")


@pytest.mark.parametrize("args", quoted())
def test_a_quoted_command_is_one_the_program_takes(args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    context = parsed(args)
    words = context.command_path.split()[1:]
    assert words == args[: len(words)]
    given = [name for name in context.params if context.get_parameter_source(name).name == "COMMANDLINE"]
    assert bool(given) == (len(args) > len(words)), "what follows the command is read as its settings"


def test_readme_shows_every_command() -> None:
    shown = {args[0] for args in medusa_lines((ROOT / "README.md").read_text(encoding="utf-8"))}
    assert shown == {module.rpartition(".")[2].strip("_").replace("_", "-") for module in COMMANDS}


def test_readme_says_who_it_is_for_and_shows_a_reply_before_any_figure() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "It is for people who " in text[: text.index("make setup")]
    assert 0 < text.index("\nread ") < text.index("## Measured")


def test_readme_says_how_medusa_gets_on_the_path() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    installed = text[text.index("## Install") : text.index("## Commands")]
    assert "source .venv/bin/activate" in installed
    assert "source .venv/bin/activate" in text[: text.index("make demo")]


@pytest.mark.parametrize("file", WRITTEN_BY_HAND, ids=lambda file: file.name)
def test_a_quoted_make_target_is_in_the_makefile(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    in_blocks = [word for words in shell_lines(text) if words[0] == "make" for word in words[1:] if "=" not in word]
    inline = re.findall(r"`make ([a-z-]+)", text)
    assert set(in_blocks + inline) <= targets


def test_each_line_of_make_help_fits_a_terminal() -> None:
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert listed.count("\n") > 10
    assert max(map(len, listed.splitlines())) <= 80


def test_the_map_is_the_package_s() -> None:
    assert (ROOT / "docs/map.md").read_text(encoding="utf-8") == package_map(), "run: make docs"


def test_each_file_says_in_its_first_line_what_it_is() -> None:
    silent = [
        str(file.relative_to(ROOT))
        for file in sorted(PACKAGE.rglob("*.py"))
        if file.name != "__init__.py" and not ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert not silent


def test_the_table_of_rooms_in_readme_names_each_room() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `medusa_cli/(\w+)/` \|", text, re.MULTILINE))
    assert named == {folder.parent.name for folder in PACKAGE.glob("*/__init__.py")}


def test_the_demo_begins_with_a_reply_and_a_bench_of_the_heads_that_ship() -> None:
    assert [args[0] for args in demo_lines()[:3]] == ["generate", "bench", "train-heads"]
    assert not any("--heads" in args for args in demo_lines()[:2])


@pytest.mark.parametrize("file", WRITTEN_BY_HAND, ids=lambda file: file.name)
def test_links_and_paths_in_a_document_lead_somewhere(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    prose = FENCED.sub("", text)
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", prose) if "://" not in link]
    paths = re.findall(r"`((?:medusa_cli|tests|docs|recipes)/[\w./-]*)`", prose)
    missing = [link for link in links if not (file.parent / link).exists()]
    missing += [path for path in paths if not (ROOT / path).exists()]
    rooms = "|".join(folder.parent.name for folder in PACKAGE.glob("*/__init__.py"))
    within = re.findall(rf"`((?:{rooms})/[\w/]*(?:\.py)?)`", prose)
    missing += [path for path in within if not any((PACKAGE / f"{path}{end}").exists() for end in ("", ".py"))]
    assert not missing


def test_readme_lists_the_architectures_the_laws_run_on() -> None:
    # read off the source: importing it builds on torch and transformers
    tree = ast.parse((ROOT / "tests/tiny_models.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    known = [ast.literal_eval(call.args[0]) for call in calls if ast.unparse(call.func) == "Architecture"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^(?:`llama`[\w` \n]*?)\n\n", text, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", listed)) == sorted(known)


def test_the_layers_of_the_architecture_are_those_of_the_test() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    drawn = re.findall(r"^ ?(\d+)  ((?:\w+  ?)+)", text, re.MULTILINE)
    assert {int(number): set(rooms.split()) for number, rooms in drawn} == {
        number: set(rooms) for number, rooms in enumerate(LAYERS)
    }


def test_the_hot_loop_of_the_architecture_is_the_code() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    (quoted,) = [block for language, block in FENCED.findall(text) if language == "python"]
    code = (PACKAGE / "decode/step.py").read_text(encoding="utf-8").splitlines()
    first = next(place for place, line in enumerate(code) if "propose" in line)
    assert quoted.splitlines() == [line.strip() for line in code[first:]]


MAKERS = {
    "bench/report.py": ["build_report", "arm_figures", "_result"],
    "cli/generate.py": ["_document"],
    "cli/train_heads.py": ["_document"],
    "inspect/report.py": ["document", "comparison_document"],
}
"""The functions that make the JSON documents of the commands."""


def json_names() -> set[str]:
    """The names in these documents."""
    found = set()
    for file, names in MAKERS.items():
        body = ast.parse((PACKAGE / file).read_text(encoding="utf-8")).body
        makers = [node for node in body if isinstance(node, ast.FunctionDef) and node.name in names]
        assert len(makers) == len(names), file
        dicts = [node for maker in makers for node in ast.walk(maker) if isinstance(node, ast.Dict)]
        found |= {key.value for node in dicts for key in node.keys if isinstance(key, ast.Constant)}
    return found


def test_every_name_of_a_json_document_is_explained() -> None:
    text = (ROOT / "docs/structures.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"[`\"](\w+)[`\"]", text))
    assert json_names() <= explained, sorted(json_names() - explained)
