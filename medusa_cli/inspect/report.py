"""What a tree is worth, in words and as JSON: its nodes, what each size gains and costs, two trees side by side.

Prints nothing and knows no command line.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from medusa_cli.errors import MissingExtra
from medusa_cli.inspect import chart, render
from medusa_cli.inspect.render import NodeInfo
from medusa_cli.inspect.worth import Inspection, KnownCost, Worth
from medusa_cli.trees import contexts
from medusa_cli.trees.tree import Path

_NO_ACCURACY = "No accuracies were measured for this tree: its gain is unknown. Name the heads with --heads."
_NO_COST = (
    'No step cost was measured (neither accuracy.json nor provenance.json holds "step_cost"): '
    "cost and speed-up are unknown. --measure measures the cost here."
)


def page(inspection: Inspection, width: int) -> str:
    """The tree drawn, its numbers explained, the curves and the budget table, at most `width` columns wide."""
    tokens = inspection.expected_tokens
    head = [*textwrap.wrap(inspection.name, width), render.counts(inspection.nodes) + _per_depth(inspection.nodes)]
    parts = ["\n".join(head), render.to_text(inspection.nodes, width)]
    if inspection.measured is None:
        known = [textwrap.fill(_NO_ACCURACY, width), *_costs_alone(inspection, width), *_contexts(inspection)]
        return "\n\n".join([*parts, *known]) + "\n"
    assert tokens is not None
    positions = "" if inspection.measured.positions is None else f"{inspection.measured.positions:,} positions of "
    legend = (
        f"expected tokens a step: {tokens:.2f}, 1 from the target and {tokens - 1:.2f} from the nodes. "
        "acceptance: chance that a node is right when its parent is. reached: chance that it and all above it are "
        f"right. share: its part of the {tokens - 1:.2f}. Measured on {positions}{inspection.measured.source}."
    )
    worth = [textwrap.fill(legend, width), *_curves(inspection, width), _budget_text(inspection, width)]
    return "\n\n".join([*parts, *worth, *_contexts(inspection)]) + "\n"


def document(inspection: Inspection) -> dict[str, Any]:
    """Everything `page` says, as one JSON document."""
    measured = inspection.measured
    return {
        "name": inspection.name,
        "tree": render.to_json(inspection.nodes),
        "prediction": asdict(inspection.prediction) if inspection.prediction else None,
        "budget": [asdict(row) for row in inspection.budget],
        "choice": asdict(inspection.choice) if inspection.choice else None,
        "measured": measured and {"positions": measured.positions, "source": measured.source},
        "step_cost": asdict(inspection.known_cost) if inspection.known_cost else None,
        "curve": [asdict(row) for row in inspection.curve],
        "contexts": [asdict(cost) for cost in inspection.contexts],
    }


def comparison_page(a: Inspection, b: Inspection, width: int) -> str:
    """Two trees side by side: size, nodes at each depth, gain, and the nodes only one of them has."""
    depths_a, depths_b = render.per_depth(a.nodes), render.per_depth(b.nodes)
    rows: list[tuple[str, object, object]] = [
        ("", "A", "B"),
        ("nodes", len(a.nodes), len(b.nodes)),
        ("nodes with the root", a.tree.num_nodes, b.tree.num_nodes),
    ]
    for depth in range(max(len(depths_a), len(depths_b))):
        at_a, at_b = ((*depths[depth : depth + 1], 0)[0] for depths in (depths_a, depths_b))
        rows.append((f"nodes at depth {depth + 1}", at_a, at_b))
    if a.expected_tokens is not None and b.expected_tokens is not None:
        rows.append(("expected tokens a step", f"{a.expected_tokens:.3f}", f"{b.expected_tokens:.3f}"))
    if a.prediction and b.prediction:
        rows.append(("step cost", f"{a.prediction.cost_ratio:.2f}x", f"{b.prediction.cost_ratio:.2f}x"))
        rows.append(("predicted speed-up", f"{a.prediction.speedup:.2f}x", f"{b.prediction.speedup:.2f}x"))
    table = "\n".join(f"{name:24}{at_a!s:>10}{at_b!s:>10}" for name, at_a, at_b in rows)
    missing = _NO_ACCURACY if a.measured is None else _NO_COST if a.cost is None else ""
    only_a, only_b, both = _differences(a, b)
    parts = [
        f"A  {a.name}\nB  {b.name}",
        table,
        textwrap.fill(missing, width),
        f"in both: {len(both)}",
        _listed("only in A", only_a, width),
        _listed("only in B", only_b, width),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def comparison_document(a: Inspection, b: Inspection) -> dict[str, Any]:
    """Everything `comparison_page` says, as one JSON document."""
    only_a, only_b, both = _differences(a, b)
    return {"a": document(a), "b": document(b), "only_in_a": only_a, "only_in_b": only_b, "in_both": both}


def _per_depth(nodes: Sequence[NodeInfo]) -> str:
    """Nodes at each depth, in words."""
    depths = render.per_depth(nodes)
    return f" ({' + '.join(str(count) for count in depths)} nodes by depth)" if len(depths) > 1 else ""


def _curves(inspection: Inspection, width: int) -> list[str]:
    """The curves where cost and gain are known, or how to get them; whose costs these are."""
    if inspection.known_cost is None:
        return []
    try:
        drawn = chart.draw(inspection, width)
    except MissingExtra as error:
        drawn = f"for the curves in the terminal: {error.hint}"
    return [drawn, textwrap.fill(provenance(inspection.known_cost), width)]


def _costs_alone(inspection: Inspection, width: int) -> list[str]:
    """What steps cost, where no gain is known."""
    if inspection.known_cost is None or inspection.cost is None:
        return []
    cost, measured = inspection.cost, sorted(inspection.known_cost.seconds)
    listed = ", ".join(f"{nodes}: {cost.ratio(nodes):.2f}x" for nodes in measured)
    text = f"cost of a step in plain steps, by nodes with the root: {listed}"
    return [textwrap.fill(text, width), textwrap.fill(provenance(inspection.known_cost), width)]


def _contexts(inspection: Inspection) -> list[str]:
    """The cost by context, where it was measured."""
    return [contexts.to_text(inspection.contexts)] if inspection.contexts else []


def provenance(cost: KnownCost) -> str:
    """Whose costs these are, and what is in them."""
    if cost.source == "heads":
        return (
            "step cost: measured where the heads were trained, with the time that guessing takes. "
            "--measure measures it here."
        )
    threads = f"{cost.threads} thread{'s' if cost.threads != 1 else ''}"
    return (
        f"step cost: measured here with runner {cost.runner} on {(cost.date or '')[:10]} ({cost.dtype}, {threads}), "
        "without the time that guessing takes."
        + (" The machine was busy meanwhile: --measure measures again." if cost.disturbed else "")
    )


def _budget_text(inspection: Inspection, width: int) -> str:
    """The budget table and what follows from it."""
    lines = ["best tree of each size for these accuracies:", f"{'nodes':>11}{'tokens/step':>13}"]
    rows = [(f"{row.size}", row) for row in inspection.budget]
    if inspection.expected_tokens is not None:
        own = inspection.prediction
        size = len(inspection.nodes)
        ratio, speedup = (own.cost_ratio, own.speedup) if own else (None, None)
        rows.append((f"this: {size}", Worth(size, inspection.expected_tokens, ratio, speedup)))
    if inspection.choice:
        rows.append((f"best: {inspection.choice.size or 'none'}", Worth(**asdict(inspection.choice))))
    if inspection.cost:
        lines[1] += f"{'step cost':>11}{'speed-up':>10}"
    for name, row in rows:
        cost = "" if row.cost_ratio is None else f"{row.cost_ratio:10.2f}x{row.speedup:9.2f}x"
        lines.append(f"{name:>11}{row.expected_tokens:13.2f}{cost}")
    return "\n".join([*lines, "", textwrap.fill(_conclusion(inspection), width)])


def _conclusion(inspection: Inspection) -> str:
    """Which size pays best."""
    if inspection.choice is None:
        return _NO_COST
    if inspection.choice.size == 0:
        return "Best size: none. No tree pays at this step cost: plain decoding is faster."
    nodes = "1 node pays" if inspection.choice.size == 1 else f"{inspection.choice.size} nodes pay"
    return f"{nodes} best: {inspection.choice.speedup:.2f}x predicted."


def _differences(a: Inspection, b: Inspection) -> tuple[list[Path], list[Path], list[Path]]:
    """Paths only in a, only in b, and in both."""
    in_a, in_b = {node.path for node in a.nodes}, {node.path for node in b.nodes}
    return sorted(in_a - in_b), sorted(in_b - in_a), sorted(in_a & in_b)


def _listed(name: str, paths: Sequence[Path], width: int) -> str:
    """A count and the paths, wrapped."""
    words = " ".join(render.path_text(path) for path in paths)
    return textwrap.fill(f"{name}: {len(paths)}  {words}".rstrip(), width, subsequent_indent="  ")
