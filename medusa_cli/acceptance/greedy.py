"""Greedy acceptance: a guess survives when it is the target's own best token. Exact."""

from torch import Tensor

from medusa_cli.acceptance.path import verdict_from
from medusa_cli.contracts import Draft, Uniform, Verdict
from medusa_cli.kernels.argmax import argmax


class Greedy:
    """The text equals plain greedy decoding of the target."""

    exact = True

    def first(self, logits_BV: Tensor, uniform: Uniform | None = None) -> Tensor:
        """The best token of each row."""
        return argmax(logits_BV)

    def accept(self, draft: Draft, logits_BNV: Tensor, uniform: Uniform | None = None) -> Verdict:
        """The longest path of best tokens, and the best token after it."""
        return verdict_from(draft, argmax(logits_BNV))
