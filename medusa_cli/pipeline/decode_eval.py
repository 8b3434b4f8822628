"""Decodes of held-out prompts with heads that are still learning: greedily, in our own loop, as the stored heads will.

The tree is a chain of all heads. It needs no fit, so every decode of every run can be held against every other, and
what it keeps is what the conditional accuracies say; the tree that is fitted in the end keeps as much or more.
"""

from collections.abc import Mapping, Sequence

import torch

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.assemble import in_shape, lay_out_heads
from medusa_cli.config.recipe import Recipe
from medusa_cli.contracts import Drafter
from medusa_cli.decode.loop import Parts, collect
from medusa_cli.decode.rows import Limits
from medusa_cli.heads.base import Heads
from medusa_cli.heads.kinds import heads_class
from medusa_cli.model.costs import by_nodes
from medusa_cli.model.target import Target
from medusa_cli.pipeline.inner_states import read_before
from medusa_cli.train.early_stopping import Decoded
from medusa_cli.trees.tree import TokenTree

PROMPTS, NEW_TOKENS = 8, 64
COST_CONTEXT, COST_ROUNDS, COST_PATIENCE_S = 256, 15, 10.0


class Probe:
    """Decodes the same prompts with any heads of this target.

    The cost of a step is measured at the first decode and then known: it is a machine's, not the heads'. Random
    numbers that others draw stay as they would be without it.
    """

    def __init__(self, target: Target, prompts: Sequence[Sequence[int]], recipe: Recipe) -> None:
        """prompts: ids, each with room for a new token."""
        data = recipe.data
        self._target = target
        self._prompts = prompts
        self._stored = getattr(torch, recipe.heads.stored)
        longest = min(data.max_seq_length, target.context_limit or data.max_seq_length)
        self._limits = Limits(min(NEW_TOKENS, data.max_answer_tokens), target.stop_ids, longest)
        self._rows = min(len(prompts), data.rows)
        self._cost_ratio: float | None = None

    def __call__(self, heads: Heads) -> Decoded:
        """What these heads gain a step, as they would be stored; they themselves stay as they are."""
        with torch.random.fork_rng([device for device in self._target.devices if device.type == "cuda"]):
            drafter = in_shape(self._as_stored(heads), TokenTree.chain(heads.config.num_heads))
            written = collect(Parts(self._target, drafter, Greedy()), self._prompts, self._limits, self._rows)
            if self._cost_ratio is None:
                self._cost_ratio = self._measure(drafter, heads.config.num_heads + 1)
        steps, tokens = sum(one.num_steps for one in written), sum(sum(one.kept) for one in written)
        # texts that all end with their first token have no step: one token each, as plain decoding
        per_step = tokens / steps if steps else 1.0
        return Decoded(per_step, per_step / self._cost_ratio)

    def _as_stored(self, heads: Heads) -> Heads:
        """A copy, rounded as it will be stored, in the target's dtype and layout."""
        target, config = self._target, heads.config
        copy = heads_class(config.type)(config, heads.draft_ids).to(heads.device)
        copy.load_state_dict(heads.state_dict())
        copy = copy.to(self._stored).to(device=target.device, dtype=target.dtype)
        copy.bind(target.output_weight, target.output_bias if config.output_bias else None)
        lay_out_heads(copy.requires_grad_(False).eval(), target)
        return copy

    def _measure(self, drafter: Drafter, num_nodes: int) -> float:
        """What a step of these nodes costs in plain steps, the draft included."""
        read_before(self._target, drafter, COST_CONTEXT)
        costs = by_nodes.measure(
            self._target,
            (1, num_nodes),
            context=COST_CONTEXT,
            rounds=COST_ROUNDS,
            patience_s=COST_PATIENCE_S,
            propose=drafter.propose,
        ).seconds
        return costs[num_nodes] / costs[1]


def choose_prompts(keys: Sequence[str], prompts: Mapping[str, Sequence[int]]) -> list[Sequence[int]]:
    """Up to PROMPTS of the samples whose prompt is known, spread evenly: the same ones each time."""
    known = [prompts[key] for key in keys if key in prompts]
    most = min(PROMPTS, len(known))
    return [known[number * len(known) // most] for number in range(most)]
