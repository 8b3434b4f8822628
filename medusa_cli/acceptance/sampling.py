"""Sampling of a text: the logits processing of its own and the rule that decides; rows of one batch may differ.

Shape letters: B rows, N tree nodes, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.acceptance.logits_processors import Shaping, Text
from medusa_cli.contracts import AcceptanceRule, Draft, Uniform, Verdict

Part = TypeVar("Part")


@dataclass(frozen=True)
class Choosing:
    """How one text's tokens are chosen: logits are reworked by `shaping`, then `rule` decides.

    Texts that hold the same objects are decided together.
    """

    rule: AcceptanceRule
    shaping: Shaping | None = None

    @property
    def mends(self) -> bool:
        """Whether logits that are not finite are made finite before the rule sees them."""
        return self.shaping is not None and self.shaping.mends


GREEDY = Choosing(Greedy())


def rule_of(rules: Sequence[AcceptanceRule]) -> AcceptanceRule:
    """The rule over these rows: the one they share, or each row's own."""
    first = rules[0]
    return first if all(rule is first for rule in rules) else RowRules(rules)


def shaped_first(logits_BV: Tensor, shapings: Sequence[Shaping | None], rows: Sequence[Text]) -> Tensor:
    """The logits that decide each row's first token, as its settings ask; as they are where none asks."""
    if not any(shapings):
        return logits_BV
    shaped_BV = logits_BV.float().clone()
    for shaping, members in _groups(shapings):
        if shaping is not None:
            shaped_BV[members] = shaping.first(logits_BV[members], [rows[row] for row in members])
    return shaped_BV


def shaped_nodes(logits_BNV: Tensor, draft: Draft, shapings: Sequence[Shaping | None], rows: Sequence[Text]) -> Tensor:
    """The logits at each node, as its row's settings ask; as they are where none asks."""
    if not any(shapings):
        return logits_BNV
    shaped_BNV = logits_BNV.float().clone()
    for shaping, members in _groups(shapings):
        if shaping is not None:
            shaped_BNV[members] = shaping.nodes(
                logits_BNV[members], draft.of_rows(members), [rows[row] for row in members]
            )
    return shaped_BNV


class RowRules:
    """Acceptance by a rule of each row's own: rows of one rule are decided together."""

    def __init__(self, rules: Sequence[AcceptanceRule]) -> None:
        self.exact = all(rule.exact for rule in rules)
        self._groups = _groups(rules)

    def first(self, logits_BV: Tensor, uniform: Uniform) -> Tensor:
        """The first root of each row."""
        chosen_B = torch.empty(len(logits_BV), dtype=torch.long, device=logits_BV.device)
        for rule, members in self._groups:
            chosen_B[members] = rule.first(logits_BV[members], _of_rows(uniform, members))
        return chosen_B

    def accept(self, draft: Draft, logits_BNV: Tensor, uniform: Uniform) -> Verdict:
        """Each row's surviving path and the token after it."""
        num_rows, device = len(logits_BNV), logits_BNV.device
        path_BD = torch.full((num_rows, draft.tree.max_depth + 1), -1, dtype=torch.long, device=device)
        kept_B, next_B = (torch.empty(num_rows, dtype=torch.long, device=device) for _ in range(2))
        for rule, members in self._groups:
            verdict = rule.accept(draft.of_rows(members), logits_BNV[members], _of_rows(uniform, members))
            # these rows' trees may be less deep than others: what lies past their end is no node
            path_BD[members, : verdict.path_BD.shape[1]] = verdict.path_BD
            kept_B[members], next_B[members] = verdict.kept_B, verdict.next_B
        return Verdict(path_BD, kept_B, next_B)


def _groups(parts: Sequence[Part]) -> list[tuple[Part, list[int]]]:
    """Each of the objects with the rows that hold it."""
    rows: dict[int, list[int]] = {}
    for row, part in enumerate(parts):
        rows.setdefault(id(part), []).append(row)
    return [(parts[members[0]], members) for members in rows.values()]


def _of_rows(uniform: Uniform, members: Sequence[int]) -> Uniform:
    """The random numbers of these rows."""
    return lambda places: uniform(places)[list(members)]
