"""One step of decoding: every command, the bench and distillation call this, and nothing copies it."""

import torch

from medusa_cli.acceptance.shaping import Shaping
from medusa_cli.contracts import AcceptanceRule, Drafter, Step
from medusa_cli.decode.rows import Rows
from medusa_cli.target.model import Target


@torch.inference_mode()
def take_step(
    target: Target,
    drafter: Drafter,
    rule: AcceptanceRule,
    rows: Rows,
    shaping: Shaping | None = None,
) -> Step:
    """Guess a tree, check it with one forward, keep one path per row."""
    draft = drafter.propose(rows.context)  # a tree of guesses under each row's root
    seen = target.verify(draft, rows.cache)  # one forward scores every node
    logits_BNV = seen.logits_BNV if shaping is None else shaping.nodes(seen.logits_BNV, draft, rows.active)
    verdict = rule.accept(draft, logits_BNV, rows.uniform)  # which path survives, and what follows it
    verdict = rows.limit(verdict, draft)  # cut at stops and budgets: the one place, the one host read
    rows.cache.keep(verdict)  # keys and values of the losers are forgotten
    return rows.advance(draft, verdict, seen.hidden_BNH)  # verdict.next_B becomes the new root
