"""The map: which room may import which, and what `medusa --help` must not import."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "medusa_cli"
LAYERS = (
    ("errors", "util", "reference"),
    ("kernels", "trees", "config"),
    ("contracts",),
    ("heads", "model"),
    ("drafters", "acceptance", "formats", "data", "prefix"),
    ("decode", "train"),
    ("registry",),
    ("assemble", "choosing"),
    ("bench", "inspect", "pipeline"),
    ("plots", "serve"),
    ("api", "cli"),
)
LAYER_OF = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
FREE = {"__init__", "__main__"}


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(tree: ast.AST) -> Iterator[str]:
    """The room of each import of ours, those inside functions included; '' for the package itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the package: from medusa_cli.room import thing"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = inner if node.module == "medusa_cli" else [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name.split(".")[1] for name in names if name.startswith("medusa_cli."))


def faults(room: str, tree: ast.AST, file: str) -> list[str]:
    """A sentence for each import that goes up or sideways."""
    return [
        f"{file} (layer {LAYER_OF[room]}) imports {other} (layer {LAYER_OF[other]}): a room imports lower layers only"
        for other in imported_rooms(tree)
        # errors.py holds no code: it lies under its own layer too
        if other in LAYER_OF and other not in (room, "errors") and LAYER_OF[other] >= LAYER_OF[room]
    ]


def test_a_room_imports_lower_layers_and_itself_only() -> None:
    found = [
        fault
        for file in sorted(PACKAGE.rglob("*.py"))
        if room_of(file) not in FREE
        for fault in faults(room_of(file), ast.parse(file.read_text(encoding="utf-8")), str(file.relative_to(PACKAGE)))
    ]
    assert not found, "\n" + "\n".join(found)


def test_every_room_has_a_layer() -> None:
    strangers = {room_of(file) for file in PACKAGE.rglob("*.py")} - set(LAYER_OF) - FREE
    assert not strangers, f"give a layer, here and in docs/architecture.md, to {', '.join(sorted(strangers))}"


@pytest.mark.parametrize(
    "line", ["from medusa_cli.acceptance.greedy import X", "import medusa_cli.decode", "from medusa_cli import cli"]
)
def test_an_import_up_or_sideways_is_a_fault_even_inside_a_function(line: str) -> None:
    (fault,) = faults("drafters", ast.parse(f"def propose():\n    {line}"), "drafters/medusa.py")
    assert fault.startswith("drafters/medusa.py (layer 4) imports ")


@pytest.mark.parametrize("heavy", ["torch", "transformers", "pydantic", "rich"])
def test_the_help_needs_no_heavy_import(heavy: str) -> None:
    program = "import sys; from medusa_cli.cli.app import main; main(['--help']); sys.exit(sys.argv[1] in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program, heavy], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert run.returncode == 0, f"`medusa --help` imports {heavy}: {run.stderr}"


def test_only_what_draws_knows_rich() -> None:
    knowing = [
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, (ast.Import, ast.ImportFrom)) and "rich" in ast.unparse(node).split()[1].split(".")[0]
    ]
    assert set(knowing) <= {"cli/drawing.py"}
