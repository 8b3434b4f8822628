"""How likely the target finds answers that it did not write: a sample of them under its own forward."""

import math
from collections.abc import Sequence

import torch

from medusa_cli.contracts import Draft
from medusa_cli.data.tokens import Tokens
from medusa_cli.model.target import Target
from medusa_cli.trees.tree import TokenTree

SAMPLES = 16  # answers looked at, spread over the data
LONGEST = 512  # tokens read of each
# perplexity: above what a model has on words it drew itself at temperature 1 (figures in docs/structures.md)
UNLIKELY = 8.0


def perplexity(target: Target, samples: Sequence[Tokens]) -> float | None:
    """exp of the mean surprise of a learnt token, -log p under the target, on up to SAMPLES of these samples.

    None when none of them has a learnt token behind its first, or the model's numbers are not finite.
    """
    chosen = samples[:: max(1, len(samples) // SAMPLES)][:SAMPLES]
    surprise, places = 0.0, 0
    for sample in chosen:
        ids, learnt = sample.ids[:LONGEST], torch.tensor(sample.supervised[1:LONGEST])
        if not learnt.any():
            continue
        tokens_BN = torch.tensor([ids], device=target.device)
        draft = Draft(tokens_BN, TokenTree.chain(len(ids) - 1), None)
        logits_NV = target.verify(draft, target.new_cache(1, len(ids)), [len(ids)]).logits_BNV[0, :-1][
            learnt.to(target.device)
        ]
        wanted_N = tokens_BN[0, 1:][learnt.to(target.device)]
        surprise += float(torch.nn.functional.cross_entropy(logits_NV.float(), wanted_N, reduction="sum"))
        places += int(learnt.sum())
    return math.exp(min(surprise / places, 700.0)) if places and math.isfinite(surprise) else None


def warning_of(figure: float | None, whose: str) -> str | None:
    """A sentence when the target would hardly say these answers, or None."""
    if figure is None or figure <= UNLIKELY:
        return None
    return (
        f"the model finds {whose} unlikely: perplexity {figure:.1f}, above {UNLIKELY:g}. Heads learn to guess the "
        "model's own words: --answers-from self has it answer the same prompts itself"
    )
