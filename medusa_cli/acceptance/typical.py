"""Typical acceptance: a guess survives when the target finds it likely enough, given how sure the target is. Not exact.

From "Medusa" (arXiv 2401.10774, section 2.3.1): token x is accepted after a prefix with the distribution p when
p(x) > min(epsilon, alpha * exp(-H(p))). Texts are plausible and paths longer, but what is written depends on what is
guessed, so it is not the target's own text, nor distributed as its samples are.
Shape letters: B rows, N tree nodes, V vocabulary.
"""

import torch
from torch import Tensor

from medusa_cli.acceptance.path import log_chances, verdict_of
from medusa_cli.acceptance.random_streams import at_nodes, draw
from medusa_cli.contracts import Draft, Uniform, Verdict


class Typical:
    """Keeps the deepest path of guesses that are all likely enough; between equals, the likeliest path."""

    exact = False

    def __init__(self, temperature: float, threshold: float = 0.09, alpha: float = 0.3) -> None:
        """temperature > 0; threshold is epsilon, in (0, 1); alpha > 0."""
        assert temperature > 0
        assert 0 < threshold < 1
        assert alpha > 0
        self.temperature = temperature
        self.threshold = threshold
        self.alpha = alpha

    def first(self, logits_BV: Tensor, uniform: Uniform) -> Tensor:
        """A draw from the tokens that are likely enough."""
        p_B1V = self._probabilities(logits_BV[:, None])
        return _draw(p_B1V, self._least(p_B1V), uniform(1))[:, 0]

    def accept(self, draft: Draft, logits_BNV: Tensor, uniform: Uniform) -> Verdict:
        """The deepest path of likely guesses, and a likely token after it."""
        p_BNV = self._probabilities(logits_BNV)
        least_BN = self._least(p_BNV)
        logp_BN = log_chances(draft, p_BNV)
        parents_BN = draft.tree.parents_XN.expand(len(p_BNV), -1)
        right_BN = logp_BN > least_BN.gather(1, parents_BN).log()
        return verdict_of(draft, right_BN, _draw(p_BNV, least_BN, at_nodes(uniform, draft.tree)), logp_BN)

    def _probabilities(self, logits: Tensor) -> Tensor:
        return (logits.float() / self.temperature).softmax(-1)

    def _least(self, p: Tensor) -> Tensor:
        """The probability above which a token is accepted [...], from distributions [..., V]."""
        entropy = torch.special.entr(p).sum(-1)
        return (self.alpha * torch.exp(-entropy)).clamp(max=self.threshold)


def _draw(p_BNV: Tensor, least_BN: Tensor, uniform_BN: Tensor) -> Tensor:
    """A token above `least` for each distribution; the best one where none is [B, N]."""
    best_BN1 = p_BNV.amax(-1, keepdim=True)
    kept_BNV = p_BNV.masked_fill((p_BNV <= least_BN[..., None]) & (p_BNV < best_BN1), 0)
    return draw(kept_BNV.flatten(0, 1), uniform_BN.flatten()).view_as(uniform_BN)
