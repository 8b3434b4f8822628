"""Trees and accuracies as files and as words on the command line.

A SPEC is `none` or `empty` · `chain:4` · `4x2x1` (a full product: 4 nodes under the root, 2 under each, 1 under each
of those) · a list of rank paths such as `[[0],[0,0],[1]]`. A file is a tree.json, a folder that holds one, or a
medusa-choices file: a list of rank paths, bare or assigned to a name in a Python file (`FILE:NAME` picks one of many).
Nothing is ever executed.
"""

import ast
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import isfinite
from pathlib import Path
from typing import Any

from medusa_cli.errors import FormatError, MedusaError, TreeError
from medusa_cli.trees.dynamic import DynamicShape
from medusa_cli.trees.tree import TokenTree
from medusa_cli.util.files import write_atomically
from medusa_cli.util.plain_json import parse_json

MAX_NODES = 1024
_MAX_BYTES = 4_000_000
_FORMS = "write chain:4, 4x2x1, none, [[0],[0,0],[1]], or name a tree.json or medusa-choices file"


def parse_tree(text: str) -> TokenTree:
    """The tree that a SPEC or a file name means. Raises TreeError saying what is wrong and where."""
    spec = text.strip()
    if not spec:
        raise TreeError("no tree is named", _FORMS)
    if spec.lower() in ("none", "empty"):
        return TokenTree.empty()
    if match := re.fullmatch(r"chain:(\d+)", spec, re.ASCII):
        return _chain(_number(match[1]), spec)
    if re.fullmatch(r"\d+(x\d+)*", spec, re.ASCII):
        return _full_product([_number(digits) for digits in spec.split("x")], spec)
    if spec.startswith(("[", "(")):
        return _from_value(_literal(spec, _named(spec)), _named(spec))
    return read_tree(Path(spec))


def read_tree(file: Path) -> TokenTree:
    """The tree in a tree.json, a folder with a tree.json, or a medusa-choices file (`FILE:NAME` for one of many)."""
    name = None
    stem, _, last = str(file).rpartition(":")
    if not os.path.exists(file) and os.path.isfile(stem):
        file, name = Path(stem), last
    if os.path.isdir(file):
        file = file / "tree.json"
        if not file.exists():
            raise TreeError(f"{file} is missing", "name a folder that train-heads wrote, or a tree with --tree")
    text = _read_text(file)
    value = _literal(text, str(file)) if text.lstrip()[:1] in ("[", "(", "{") else _assigned(text, name, str(file))
    if isinstance(value, dict):
        if "paths" not in value:
            raise TreeError(f'{file} holds no "paths"', 'a tree.json reads {"paths": [[0], [0, 0], [1]]}')
        value = value["paths"]
    return _from_value(value, str(file))


def read_shape(folder: Path) -> TokenTree | DynamicShape:
    """What the heads in `folder` draft in when no tree is named: the dynamic shape stored with them, else the tree."""
    tree, file = read_tree(folder), folder / "tree.json"
    value = _literal(_read_text(file), str(file))
    spec = value.get("dynamic") if isinstance(value, dict) else None
    if spec is None:
        return tree
    shape = DynamicShape.parse(spec) if isinstance(spec, str) else None
    if shape is None:
        raise TreeError(f"{file}: {_shown(spec)} is no dynamic tree", "write dynamic:SIZE:FLOOR, or leave it out")
    return shape


def write_tree(file: Path, tree: TokenTree, facts: Mapping[str, Any]) -> None:
    """Write a tree.json: the paths, then `facts` (such as expected_tokens). A kill leaves the old file or the new."""
    document = {"paths": [list(path) for path in tree.paths()], **facts}
    write_atomically(file, json.dumps(document) + "\n")


@dataclass(frozen=True)
class Measured:
    """What was measured of some heads. conditional_KR is given that the path above was right, plain_KR is not.

    step_cost holds seconds of a step by nodes verified (the root included); None when it was not measured.
    """

    plain_KR: list[list[float]]
    conditional_KR: list[list[float]]
    positions: int | None
    source: str
    step_cost: dict[int, float] | None


def read_measured(folder: Path) -> Measured:
    """accuracy.json of a heads folder, with the step cost from there or from provenance.json.

    Raises FormatError when accuracy.json is missing or holds no table of chances.
    """
    file = folder / "accuracy.json"
    facts = _read_object(file)
    plain_KR = _table(facts.get("plain"), "plain", file)
    conditional_KR = _table(facts["conditional"], "conditional", file) if "conditional" in facts else plain_KR
    cost_file = file
    if "step_cost" not in facts and (provenance := folder / "provenance.json").exists():
        cost_file = provenance
    cost = (facts if cost_file == file else _read_object(cost_file)).get("step_cost")
    positions = facts.get("positions")
    return Measured(
        plain_KR=plain_KR,
        conditional_KR=conditional_KR,
        positions=positions if isinstance(positions, int) else None,
        source=str(facts.get("source") or "an unnamed source"),
        step_cost=None if not cost else _cost(cost, cost_file),
    )


def _chain(length: int, spec: str) -> TokenTree:
    """`chain:4`: the best guess of each head."""
    _refuse_big(length, _named(spec))
    return TokenTree.chain(length)


def _full_product(widths: list[int], spec: str) -> TokenTree:
    """`4x2x1`: at each depth every node has that many children."""
    if 0 in widths:
        raise TreeError(f"{_named(spec)} has a depth without nodes", "count from 1; 'none' is the empty tree")
    total = layer = 0
    for width in widths:
        layer = (layer or 1) * width
        total += layer
        _refuse_big(total, _named(spec))
    return TokenTree.from_paths(
        path for depth in range(1, len(widths) + 1) for path in product(*(range(width) for width in widths[:depth]))
    )


def _named(spec: str) -> str:
    """A tree of the command line, as messages call it."""
    return f"tree '{_shortened(spec)}'"


def _number(digits: str) -> int:
    """A number of the command line; one too long to be of use is cut, and is still too big."""
    return int(digits.lstrip("0")[:9] or "0")


def _refuse_big(size: int, where: str) -> None:
    """Raise TreeError when a tree is bigger than any step could use."""
    if size > MAX_NODES:
        raise TreeError(f"{where} has more than {MAX_NODES} nodes", "64 nodes are plenty for a step")


def _from_value(value: Any, where: str) -> TokenTree:
    """The tree of a list of rank paths; every TreeError names `where` it was found."""
    if not isinstance(value, list | tuple):
        raise TreeError(f"{where}: {_shown(value)} is no list of paths", _FORMS)
    _refuse_big(len(value), where)
    for path in value:
        if not isinstance(path, list | tuple):
            raise TreeError(f"{where}: {_shown(path)} is no path", "a path is a list of ranks, such as [0, 1]")
        for rank in path:
            if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < 2**31:
                raise TreeError(
                    f"{where}: path {_shown(path)} holds {_shown(rank)}, which is no rank",
                    "ranks are whole numbers from 0",
                )
    try:
        return TokenTree.from_paths(value)
    except TreeError as error:
        raise TreeError(f"{where}: {error.message}", error.hint) from error


def _shown(value: Any) -> str:
    """A value as short text for a message."""
    return _shortened(repr(value))


def _shortened(text: str, length: int = 60) -> str:
    """Text that fits in a message of one line."""
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _literal(text: str, where: str) -> Any:
    """A JSON document or a Python literal; TreeError when it is neither."""
    try:
        return parse_json(text)
    except ValueError:
        pass
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise TreeError(f"{where}: this is neither JSON nor a Python list", _FORMS) from error


def _assigned(text: str, name: str | None, where: str) -> Any:
    """The list a Python file assigns to `name`, or to its only name."""
    try:
        body = ast.parse(text).body
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise TreeError(f"{where}: this is no list of paths", _FORMS) from error
    lists: dict[str, ast.expr] = {}
    for line in body:
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.List | ast.Tuple):
            lists.update({target.id: line.value for target in line.targets if isinstance(target, ast.Name)})
    if name is None and len(lists) == 1:
        name = next(iter(lists))
    if name in lists:
        return _literal(ast.unparse(lists[name]), f"{where}:{name}")
    if not lists:
        raise TreeError(f"{where}: this is no list of paths", _FORMS)
    raise TreeError(f"{where} holds {len(lists)} trees: {', '.join(lists)}", f"pick one: {where}:{next(iter(lists))}")


def _read_text(file: Path) -> str:
    """The text of a tree file, or TreeError."""
    try:
        with file.open("rb") as stream:  # a device says that it holds nothing, and never ends
            content = stream.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise TreeError(f"{file} is too big for a tree", f"a tree file lists at most {MAX_NODES} paths")
        text = content.decode("utf-8-sig")
    except FileNotFoundError as error:
        raise TreeError(f"'{_shortened(str(file), 200)}' is neither a tree nor a file", _FORMS) from error
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise TreeError(f"can't read the tree file '{_shortened(str(file), 200)}': {_reason(error)}", _FORMS) from error
    if not text.strip():
        raise TreeError(f"{file} is empty", 'the empty tree is written {"paths": []}')
    return text


def _reason(error: Exception) -> str:
    """What the system says, without the name it repeats."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _read_object(file: Path) -> dict[str, Any]:
    """A JSON object in a heads folder, or FormatError."""
    hint = "name a folder that train-heads wrote, or train the heads again"
    try:
        facts = parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FormatError(f"{file} is missing", hint) from error
    except (OSError, ValueError) as error:
        raise FormatError(f"can't read {file}: {error}", hint) from error
    if not isinstance(facts, dict):
        raise FormatError(f"{file} holds no JSON object", hint)
    return facts


def _table(value: Any, name: str, file: Path) -> list[list[float]]:
    """A list of equally long lists of chances."""
    if not isinstance(value, list) or not all(
        isinstance(row, list) and row and all(_is_number(p) and 0 <= p <= 1 for p in row) for row in value
    ):
        raise _corrupt(file, f'"{name}" is no table of chances from 0 to 1')
    if len({len(row) for row in value}) > 1:
        raise _corrupt(file, f'the rows of "{name}" differ in length')
    return [[float(p) for p in row] for row in value]


def _cost(value: Any, file: Path) -> dict[int, float]:
    """Step costs with whole numbers of nodes as keys."""
    if not isinstance(value, dict) or not all(
        key.isascii() and key.isdigit() and len(key) < 10 and _is_number(seconds) and seconds > 0
        for key, seconds in value.items()
    ):
        raise _corrupt(file, '"step_cost" is no table of seconds by number of nodes')
    return {int(key): float(seconds) for key, seconds in value.items()}


def _is_number(value: Any) -> bool:
    """Whether a JSON value is a finite number that a float holds: an integer there may have any length."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, float) and isfinite(value)


def _corrupt(file: Path, fault: str) -> MedusaError:
    """The error for a file of a heads folder that holds something else."""
    return FormatError(f"{file}: {fault}", "measure the heads again, or copy the folder again")
