"""Lossless acceptance: the output is distributed as the target's own samples, whatever is guessed.

One token is drawn at each node from the target's processed distribution there, and the walk goes to the child that
holds the token drawn, if there is one. Each kept token is a fresh draw given its own prefix, so the law of the text
is the target's; guesses only decide how many draws one forward yields. (The simplest case of recursive speculative
sampling, arXiv 2305.09781, for guesses that are certain.) The numbers drawn with go by a token's place in its text
(see draws.py): the sampled text itself is the one that plain decoding draws with the same seed.
Shape letters: B rows, N tree nodes, V vocabulary.
"""

import torch
from torch import Tensor

from medusa_cli.acceptance.path import verdict_from
from medusa_cli.acceptance.random_streams import at_nodes, draw
from medusa_cli.contracts import Draft, Uniform, Verdict

NEAR = 2048  # best tokens that hold the nucleus of nearly every distribution


class Lossless:
    """Samples with temperature, top-k and top-p, in the order transformers applies them."""

    exact = True

    def __init__(self, temperature: float, top_p: float, top_k: int) -> None:
        """temperature > 0; top_p in (0, 1], 1 keeps all; top_k >= 0, 0 keeps all."""
        assert temperature > 0
        assert 0 < top_p <= 1
        assert top_k >= 0
        self.temperature = temperature
        self.top_p = max(top_p, torch.finfo(torch.float32).tiny)  # less is 0 in float32, and keeps no token
        self.top_k = top_k

    def first(self, logits_BV: Tensor, uniform: Uniform) -> Tensor:
        """One draw for each row."""
        return self._draw(logits_BV[:, None], uniform(1))[:, 0]

    def accept(self, draft: Draft, logits_BNV: Tensor, uniform: Uniform) -> Verdict:
        """One draw at each node; the walk follows the draws."""
        return verdict_from(draft, self._draw(logits_BNV, at_nodes(uniform, draft.tree)))

    def probabilities(self, logits: Tensor) -> Tensor:
        """The processed distribution [..., V], in float32."""
        p = self._before_nucleus(logits)
        return p if self.top_p == 1 else self._nucleus(p)

    def _draw(self, logits_BNV: Tensor, uniform_BN: Tensor) -> Tensor:
        """One token id per distribution [B, N]."""
        p_MV = self._before_nucleus(logits_BNV).flatten(0, 1)
        uniform_M = uniform_BN.flatten()
        if self.top_p < 1 and p_MV.device.type == "cpu":
            drawn_M = self._draw_from_nucleus(p_MV, uniform_M)
        else:
            drawn_M = draw(p_MV if self.top_p == 1 else self._nucleus(p_MV), uniform_M)
        return drawn_M.view_as(uniform_BN)

    def _draw_from_nucleus(self, p_MV: Tensor, uniform_M: Tensor) -> Tensor:
        """Draws that sort only the best NEAR tokens, and the whole vocabulary where these fall short of top_p."""
        best_MR, ids_MR = p_MV.topk(min(NEAR, p_MV.shape[-1]), dim=-1)
        drawn_M = ids_MR.gather(1, draw(self._cut(best_MR), uniform_M, ids_MR)[:, None])[:, 0]
        wide = best_MR.sum(-1) < self.top_p
        if bool(wide.any()):
            drawn_M[wide] = draw(self._nucleus(p_MV[wide]), uniform_M[wide])
        return drawn_M

    def _before_nucleus(self, logits: Tensor) -> Tensor:
        """Temperature and top-k applied [..., V]."""
        scaled = logits.float() / self.temperature
        if self.top_k:
            least = scaled.topk(min(self.top_k, scaled.shape[-1]), dim=-1).values[..., -1:]
            scaled = scaled.masked_fill(scaled < least, float("-inf"))
        return scaled.softmax(-1)

    def _nucleus(self, p: Tensor) -> Tensor:
        """The smallest set of best tokens whose mass reaches top_p, renormalised [..., V]."""
        ordered, index = p.sort(dim=-1, descending=True)
        kept = self._cut(ordered)
        return torch.zeros_like(p).scatter(-1, index, kept / kept.sum(-1, keepdim=True))

    def _cut(self, ordered: Tensor) -> Tensor:
        """Zero for the tokens after those whose mass reaches top_p; the first always stays."""
        return ordered.masked_fill(ordered.cumsum(-1) - ordered >= self.top_p, 0)
