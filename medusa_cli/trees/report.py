"""What a tree is worth, in words and as JSON: its nodes, what each size would gain and cost, two trees side by side.

Prints nothing and knows no command line.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from medusa_cli.trees import render
from medusa_cli.trees.build import Choice, StepCost, choose_size, gain_curve, predict
from medusa_cli.trees.files import Measured
from medusa_cli.trees.render import NodeInfo
from medusa_cli.trees.tree import Path, TokenTree

BUDGET = (0, 4, 8, 16, 32, 64)
_NO_ACCURACY = "No accuracies were measured for this tree: its gain is unknown. Name the heads with --heads."
_NO_COST = (
    'No step cost was measured (neither accuracy.json nor provenance.json holds "step_cost"): '
    "cost and speed-up are unknown."
)


@dataclass(frozen=True)
class BudgetRow:
    """The best tree of a size. cost_ratio and speedup are None when no step cost was measured."""

    size: int
    expected_tokens: float
    cost_ratio: float | None
    speedup: float | None


@dataclass(frozen=True)
class Inspection:
    """A tree and what was measured of the heads that fill it. Raises TreeError when it doesn't fit these heads."""

    name: str
    tree: TokenTree
    measured: Measured | None

    def __post_init__(self) -> None:
        if self.measured:
            accuracy_KR = self.measured.conditional_KR
            self.tree.check_fits(len(accuracy_KR), len(accuracy_KR[0]) if accuracy_KR else 0)

    @cached_property
    def nodes(self) -> list[NodeInfo]:
        """The nodes, depth first."""
        return render.node_infos(self.tree.paths(), self.measured.conditional_KR if self.measured else None)

    @cached_property
    def expected_tokens(self) -> float | None:
        """Tokens a step on average, the one that the target gives anyway included."""
        gain = render.gain(self.nodes) if self.measured else None
        return None if gain is None else 1.0 + gain

    @cached_property
    def cost(self) -> StepCost | None:
        """The measured cost of a step."""
        return StepCost(self.measured.step_cost) if self.measured and self.measured.step_cost else None

    @cached_property
    def prediction(self) -> Choice | None:
        """What this tree promises, where gain and cost are known."""
        if self.cost is None or self.expected_tokens is None:
            return None
        return predict(len(self.nodes), self.expected_tokens, self.cost)

    @cached_property
    def budget(self) -> list[BudgetRow]:
        """The best tree of each size; nothing when no accuracies were measured."""
        if self.measured is None:
            return []
        gains = gain_curve(self.measured.conditional_KR, max(BUDGET))
        if self.cost is None:
            return [BudgetRow(size, gains[size], None, None) for size in BUDGET]
        choices = [predict(size, gains[size], self.cost) for size in BUDGET]
        return [BudgetRow(one.size, one.expected_tokens, one.cost_ratio, one.speedup) for one in choices]

    @cached_property
    def choice(self) -> Choice | None:
        """The size that pays best, where gain and cost are known."""
        if self.measured is None or self.measured.step_cost is None:
            return None
        return choose_size(gain_curve(self.measured.conditional_KR, max(BUDGET)), self.measured.step_cost, max(BUDGET))


def page(inspection: Inspection, width: int) -> str:
    """The tree drawn, its numbers explained, and the budget table, at most `width` columns wide."""
    tokens = inspection.expected_tokens
    head = [inspection.name, render.counts(inspection.nodes) + _per_depth(inspection.nodes)]
    parts = ["\n".join(head), render.to_text(inspection.nodes, width)]
    if inspection.measured is None:
        return "\n\n".join([*parts, textwrap.fill(_NO_ACCURACY, width)]) + "\n"
    assert tokens is not None
    positions = "" if inspection.measured.positions is None else f"{inspection.measured.positions:,} positions of "
    legend = (
        f"expected tokens a step: {tokens:.2f}, 1 from the target and {tokens - 1:.2f} from the nodes. "
        "acceptance: chance that a node is right when its parent is. reached: chance that it and all above it are "
        f"right. share: its part of the {tokens - 1:.2f}. Measured on {positions}{inspection.measured.source}."
    )
    return "\n\n".join([*parts, textwrap.fill(legend, width), _budget_text(inspection, width)]) + "\n"


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
        "step_cost": measured and measured.step_cost,
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


def _budget_text(inspection: Inspection, width: int) -> str:
    """The budget table and what follows from it."""
    lines = ["best tree of each size for these accuracies:", f"{'nodes':>11}{'tokens/step':>13}"]
    rows = [(f"{row.size}", row) for row in inspection.budget]
    if inspection.expected_tokens is not None:
        own = inspection.prediction
        size = len(inspection.nodes)
        ratio, speedup = (own.cost_ratio, own.speedup) if own else (None, None)
        rows.append((f"this: {size}", BudgetRow(size, inspection.expected_tokens, ratio, speedup)))
    if inspection.cost:
        lines[1] += f"{'step cost':>11}{'speed-up':>10}"
    for name, row in rows:
        cost = "" if row.cost_ratio is None else f"{row.cost_ratio:10.2f}x{row.speedup:9.2f}x"
        lines.append(f"{name:>11}{row.expected_tokens:13.2f}{cost}")
    if inspection.choice is None:
        verdict = _NO_COST
    elif inspection.choice.size == 0:
        verdict = "No tree pays at this step cost: plain decoding is faster."
    else:
        verdict = f"{inspection.choice.size} nodes pay best: {inspection.choice.speedup:.2f}x predicted."
    return "\n".join([*lines, "", textwrap.fill(verdict, width)])


def _differences(a: Inspection, b: Inspection) -> tuple[list[Path], list[Path], list[Path]]:
    """Paths only in a, only in b, and in both."""
    in_a, in_b = {node.path for node in a.nodes}, {node.path for node in b.nodes}
    return sorted(in_a - in_b), sorted(in_b - in_a), sorted(in_a & in_b)


def _listed(name: str, paths: Sequence[Path], width: int) -> str:
    """A count and the paths, wrapped."""
    words = " ".join(render.path_text(path) for path in paths)
    return textwrap.fill(f"{name}: {len(paths)}  {words}".rstrip(), width, subsequent_indent="  ")
