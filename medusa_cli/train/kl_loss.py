"""The price of moving away from the target's own predictions: KL of the adapted target's next token from the target's.

Self-distillation of "Medusa" (arXiv 2401.10774, section 2.3.2): the target without its adapter is the teacher. Both
sets of logits are made `chunk` places at a time, and each piece's gradient is taken before the next is made.

Shape letters: P places, C places at once, H hidden, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_cli.model.target import Target
from medusa_cli.train.texts import Texts


@dataclass(frozen=True)
class Kept:
    """At each place the KL divergence in nats, and whether the best token is still the same; grad_PH of the mean KL."""

    divergence_P: Tensor
    same_P: Tensor
    grad_PH: Tensor | None


def keep(target: Target, hidden_PH: Tensor, own_PH: Tensor, *, chunk: int, learn: bool) -> Kept:
    """How far predictions from hidden_PH are from those from own_PH, the target's own; with the gradient to learn."""
    divergence_P = torch.zeros(len(hidden_PH), device=hidden_PH.device)
    same_P = torch.zeros(len(hidden_PH), dtype=torch.bool, device=hidden_PH.device)
    grad_PH = torch.zeros_like(hidden_PH, dtype=torch.float32) if learn else None
    for start in range(0, len(hidden_PH), chunk):
        place = slice(start, start + chunk)
        with torch.no_grad():
            own_CV = target.logits_of(own_PH[place]).float().log_softmax(-1)
        piece_CH = hidden_PH[place].detach().requires_grad_(learn)
        with torch.set_grad_enabled(learn):
            adapted_CV = target.logits_of(piece_CH).float().log_softmax(-1)
            divergence_C = (own_CV.exp() * (own_CV - adapted_CV)).sum(-1)
        if grad_PH is not None:
            (divergence_C.sum() / len(hidden_PH)).backward()
            assert piece_CH.grad is not None
            grad_PH[place] = piece_CH.grad
        divergence_P[place] = divergence_C.detach()
        same_P[place] = own_CV.argmax(-1) == adapted_CV.detach().argmax(-1)
    return Kept(divergence_P, same_P, grad_PH)


@dataclass(frozen=True)
class Predictions:
    """What a target says of held-out text: the surprise of each learnt token, -log p in nats, and the best token."""

    surprise_P: Tensor
    best_P: Tensor

    @property
    def perplexity(self) -> float:
        """exp of the mean surprise."""
        return math.exp(min(float(self.surprise_P.mean()), 700.0))

    def agreement(self, other: "Predictions") -> float:
        """The share of places where both say the same token."""
        return float((self.best_P == other.best_P).float().mean())


@torch.inference_mode()
def predictions(target: Target, texts: Texts, *, batch_size: int, chunk: int) -> Predictions:
    """What the target says of all these texts, `batch_size` of them read at once."""
    surprise, best = [], []
    samples = texts.samples
    for start in range(0, len(samples), batch_size):
        reading = texts.read(samples[start : start + batch_size])
        hidden = target.read(reading.ids_BT, reading.lengths).flatten(0, 1)
        wanted = reading.ids_BT.flatten()
        for places_C in reading.learnt_P.split(chunk):
            logits_CV = target.logits_of(hidden[places_C.to(hidden.device)]).float().cpu()
            surprise.append(torch.nn.functional.cross_entropy(logits_CV, wanted[places_C + 1], reduction="none"))
            best.append(logits_CV.argmax(-1))
    return Predictions(torch.cat(surprise), torch.cat(best))
