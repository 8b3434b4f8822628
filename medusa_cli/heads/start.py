"""Heads that begin with what other heads have learnt: of another kind, of fewer heads or layers, for a tuned target."""

from dataclasses import dataclass

import torch

from medusa_cli.errors import HeadsMismatch
from medusa_cli.heads.base import Heads


@dataclass(frozen=True)
class TakenOver:
    """Names of the tensors that come from other heads, and of those that start untrained."""

    taken: list[str]
    new: list[str]


@torch.no_grad()
def take_over(heads: Heads, source: Heads) -> TakenOver:
    """Copy into `heads`, in place, what `source` has of the same heads and layers; the rest stays as it is.

    Where one has more heads or layers than the other, those that both have are copied: an untrained layer passes on
    what comes in, so what a head guesses stays the same. Rows of an own output are taken only for the same draft
    vocabulary. Raises HeadsMismatch when the hidden sizes differ.
    """
    ours, theirs = heads.config.hidden_size, source.config.hidden_size
    if ours != theirs:
        raise HeadsMismatch(
            f"heads for hidden states of {theirs} can't start heads for hidden states of {ours}",
            "start from heads of a model of the same family and size, or leave heads.start_from out",
        )
    stored = dict(source.named_parameters())
    if not torch.equal(heads.draft_ids.cpu(), source.draft_ids.cpu()):
        stored = {name: value for name, value in stored.items() if not name.startswith("output_")}
    taken: list[str] = []
    new: list[str] = []
    for name, parameter in heads.named_parameters():
        (taken if name in stored else new).append(name)
        if name in stored:
            both = tuple(slice(min(sizes)) for sizes in zip(parameter.shape, stored[name].shape, strict=True))
            parameter[both] = stored[name][both].to(parameter)
    return TakenOver(taken, new)
