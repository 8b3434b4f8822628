"""`medusa inspect-tree` run on a folder that holds what was measured of some heads."""

import json
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

from medusa_cli.cli import inspect_tree
from medusa_cli.cli.flags import taken_apart
from medusa_cli.errors import MedusaError
from medusa_cli.trees.build import best_tree
from medusa_cli.trees.files import write_tree

ACCURACY_KR = [[0.5, 0.2, 0.1, 0.05], [0.4, 0.2, 0.1, 0.05], [0.3, 0.1, 0.1, 0.05]]


def make_heads(folder: Path) -> Path:
    """A folder of what was measured of three heads, without their numbers."""
    folder.mkdir()
    facts = {"num_heads": 3, "num_ranks": 4, "plain": ACCURACY_KR, "conditional": ACCURACY_KR}
    (folder / "accuracy.json").write_text(json.dumps({**facts, "positions": 1234, "source": "dev prompts"}))
    write_tree(folder / "tree.json", best_tree(ACCURACY_KR, 8), {})
    return folder


def with_cost(heads: Path, cost: dict[int, float]) -> None:
    """Give the heads a step cost, as training stores it."""
    (heads / "provenance.json").write_text(json.dumps({"step_cost": cost}))


def run(*args: object, columns: int = 200) -> Any:
    """`medusa inspect-tree` with these arguments; mistakes of a user are raised."""
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command("inspect-tree")(taken_apart(inspect_tree.command))
    result = CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": str(columns)})
    if isinstance(result.exception, MedusaError):
        raise result.exception
    return result


def out_of(*args: object, columns: int = 200) -> str:
    """What a run that succeeds prints."""
    result = run(*args, columns=columns)
    assert result.exit_code == 0, result.output
    return result.stdout
