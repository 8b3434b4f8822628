"""One step of decoding: every command, the bench and distillation call this, and nothing copies it."""

import torch

from medusa_cli.contracts import Drafter, Step
from medusa_cli.decode.rows import Rows
from medusa_cli.model.target import Target


@torch.inference_mode()
def take_step(target: Target, drafter: Drafter, rows: Rows) -> Step:
    """Guess a tree, check it with one forward, keep one path per row."""
    draft = drafter.propose(rows.context)  # a tree of guesses under each row's root
    draft = target.ready(draft, rows.context.tokens, rows.cache, drafter)  # where tables change, a row is read anew
    seen = target.verify(draft, rows.cache, taps=drafter.taps)  # one forward scores every node
    logits_BNV = rows.shaped(seen.logits_BNV, draft)  # as generation settings ask, each node by its own text
    verdict = rows.rule.accept(draft, logits_BNV, rows.uniform)  # which path survives, and what follows it
    verdict = rows.limit(verdict, draft, seen)  # cut at stops and budgets: the one place, the one host read
    rows.cache.keep(verdict)  # keys and values of the losers are forgotten
    step = rows.advance(draft, verdict, seen)  # verdict.next_B becomes the new root
    drafter.keep(rows.context, step.taps_BDLH)  # who drafts with a memory sees what was kept
    return step
