"""A tree as text, JSON, Graphviz and medusa-choices. Everything is drawn from one list of NodeInfo; pure, no torch.

Pictures are in picture.py.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Path = tuple[int, ...]


@dataclass(frozen=True)
class NodeInfo:
    """One node of a tree, the root left out. The numbers are None when no accuracies were measured.

    path         ranks from the root down to this node
    acceptance   chance that this node is right when its parent is
    probability  chance that this node and all above it are right: the tokens it adds to a step on average
    share        probability as a part of what all nodes add together
    """

    path: Path
    acceptance: float | None
    probability: float | None
    share: float | None


def node_infos(paths: Sequence[Path], accuracy_KR: Sequence[Sequence[float]] | None) -> list[NodeInfo]:
    """What is known of each node, depth first: parents before children, siblings by rank.

    paths        every node of a tree that fits `accuracy_KR` (`TokenTree.check_fits`)
    accuracy_KR  measured chance of each head's rank, given that the path above is right; None when not measured
    """
    ordered = sorted(paths)
    if accuracy_KR is None:
        return [NodeInfo(path, None, None, None) for path in ordered]
    probability: dict[Path, float] = {(): 1.0}
    for path in ordered:
        probability[path] = probability[path[:-1]] * accuracy_KR[len(path) - 1][path[-1]]
    total = sum(probability.values()) - 1.0
    return [
        NodeInfo(
            path=path,
            acceptance=accuracy_KR[len(path) - 1][path[-1]],
            probability=probability[path],
            share=probability[path] / total if total > 0 else 0.0,
        )
        for path in ordered
    ]


def gain(nodes: Sequence[NodeInfo]) -> float | None:
    """Tokens the nodes add to a step on average, without the one that the target gives anyway."""
    return None if any(node.probability is None for node in nodes) else sum(node.probability or 0.0 for node in nodes)


def per_depth(nodes: Sequence[NodeInfo]) -> list[int]:
    """How many nodes stand at depth 1, 2, and so on."""
    deepest = max((len(node.path) for node in nodes), default=0)
    return [sum(len(node.path) == depth for node in nodes) for depth in range(1, deepest + 1)]


def counts(nodes: Sequence[NodeInfo]) -> str:
    """The size in words: nodes without and with the root, and depth."""
    noun = "node" if len(nodes) == 1 else "nodes"
    return f"{len(nodes)} {noun}, {len(nodes) + 1} with the root; depth {len(per_depth(nodes))}"


def path_text(path: Path) -> str:
    """A rank path as it is written in a tree file."""
    return "[" + ",".join(str(rank) for rank in path) + "]"


def to_text(nodes: Sequence[NodeInfo], width: int) -> str:
    """The tree in box-drawing lines of at most `width` columns, with a column for each number that is known."""
    trunks = _trunks([node.path for node in nodes])
    names = ["root", *(trunk + path_text(node.path) for trunk, node in zip(trunks, nodes, strict=True))]
    if not nodes or nodes[0].probability is None:
        return "\n".join(names)
    left = max(len(name) for name in names)
    bar = max(0, min(24, width - left - len(_NUMBERS) - 2))
    top = max(node.share or 0.0 for node in nodes) or 1.0
    lines = [f"{'':{left}}{_NUMBERS}", names[0]]
    for name, node in zip(names[1:], nodes, strict=True):
        numbers = f"{node.acceptance:12.3f}{node.probability:9.3f}{node.share:8.1%}"
        lines.append(f"{name:{left}}{numbers}  {_bar((node.share or 0.0) / top, bar)}".rstrip())
    return "\n".join(lines)


def to_json(nodes: Sequence[NodeInfo]) -> dict[str, Any]:
    """The tree as a document that is also a valid tree.json."""
    gained = gain(nodes)
    return {
        "paths": [list(node.path) for node in nodes],
        "num_nodes": len(nodes),
        "num_nodes_with_root": len(nodes) + 1,
        "max_depth": len(per_depth(nodes)),
        "per_depth": per_depth(nodes),
        "expected_tokens": None if gained is None else 1.0 + gained,
        "nodes": [
            {"path": list(n.path), "acceptance": n.acceptance, "probability": n.probability, "share": n.share}
            for n in nodes
        ],
    }


def to_choices(nodes: Sequence[NodeInfo]) -> str:
    """The tree as FasterDecoding's Medusa takes it: a list of rank paths, short ones first."""
    return json.dumps(sorted((list(node.path) for node in nodes), key=lambda path: (len(path), path)))


def to_dot(nodes: Sequence[NodeInfo]) -> str:
    """The tree as a Graphviz graph."""
    lines = [
        "digraph tree {",
        '  rankdir=LR; node [shape=box, style=rounded, fontname="Helvetica", fontsize=10]; edge [arrowsize=0.6];',
        '  "[]" [label="root", style="rounded,bold"];',
    ]
    for node in nodes:
        name = path_text(node.path)
        known = "" if node.probability is None else f"\\n{node.acceptance:.3f} · {node.share:.1%}"
        pen = "" if node.probability is None else f" [penwidth={0.5 + 4 * node.probability:.2f}]"
        lines.append(f'  "{name}" [label="{name}{known}"];')
        lines.append(f'  "{path_text(node.path[:-1])}" -> "{name}"{pen};')
    return "\n".join([*lines, "}"])


_NUMBERS = f"{'acceptance':>12}{'reached':>9}{'share':>8}"
_EIGHTHS = " ▏▎▍▌▋▊▉"


def _bar(part: float, width: int) -> str:
    """A bar of `part` of `width` columns, to an eighth of a column."""
    whole, eighths = divmod(round(part * width * 8), 8)
    return "█" * whole + _EIGHTHS[eighths].strip()


def _trunks(paths: Sequence[Path]) -> list[str]:
    """The lines left of each node, for paths in depth-first order."""
    # Read from below: a column goes on when a later sibling of the node or of one above it is still to come.
    going_on: set[int] = set()
    trunks = []
    for path in reversed(paths):
        depth = len(path)
        trunk = "".join("│  " if above in going_on else "   " for above in range(1, depth))
        trunks.append(trunk + ("├─ " if depth in going_on else "└─ "))
        going_on = {above for above in going_on if above < depth} | {depth}
    return trunks[::-1]
