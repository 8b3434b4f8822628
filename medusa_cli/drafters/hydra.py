"""Hydra's drafts: heads that see the guesses above theirs fill a fixed tree, or one of their own for every step.

Shape letters: B rows, N tree nodes with the root, M nodes of a level, C candidates with the root.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_cli.contracts import Context, Draft, PathHeads
from medusa_cli.drafters.beam import Candidates, Walk, candidates
from medusa_cli.drafters.memory import NoMemory
from medusa_cli.drafters.trie import ROOT, Trie
from medusa_cli.trees.dynamic import DynamicShape
from medusa_cli.trees.tree import TokenTree

BEAM = 4  # nodes of a level that are asked for guesses: a step's few nodes hardly hold more of one depth
RANKS = 8  # guesses of each


class HydraDrafter(NoMemory):
    """Each level is guessed in view of the one above; a source of guesses as well.

    With a dynamic shape, easy places get deep trees, hard ones shallow trees, or none.
    """

    def __init__(self, heads: PathHeads, shape: TokenTree | DynamicShape) -> None:
        """Raises TreeError when a fixed tree needs a head or rank that isn't there."""
        self.name = heads.config.type
        self.heads = heads
        self.shape = shape
        self._levels: list[_Level] = []
        if isinstance(shape, TokenTree):
            shape.check_fits(heads.config.num_heads, heads.config.draft_vocab)
            self.size = shape.num_nodes - 1
            self._levels = _levels(shape)
        else:
            self.size = shape.size

    @torch.inference_mode()
    def propose(self, context: Context) -> Draft:
        """The fixed tree, or each row's likeliest paths; siblings are distinct because ranks are."""
        if isinstance(self.shape, TokenTree):
            return self._filled(context, self.shape)
        return likeliest(guesses(self.heads, context.hidden_BH, context.root_B, self.size), self.shape)

    def _filled(self, context: Context, tree: TokenTree) -> Draft:
        """The tree, filled from the root down."""
        num_rows, device = len(context.root_B), context.root_B.device
        tokens_BN = context.root_B[:, None].repeat(1, tree.num_nodes)
        walk = Walk(self.heads, context.hidden_BH, context.root_B)
        for level in self._levels:
            best_BMR = walk.logits().topk(level.num_ranks, dim=-1).indices
            ids_BM = self.heads.to_target_ids(best_BMR[:, level.parents, level.ranks])
            tokens_BN[:, level.nodes] = ids_BM
            if not level.last:
                walk.down(torch.tensor(level.parents, device=device).expand(num_rows, -1), ids_BM)
        return Draft(tokens_BN, tree.to(device))

    def add_guesses(self, context: Context, tries: Sequence[Trie], floor: float) -> None:
        """The candidates of each row; heads are asked what follows a guess only where that could pay."""
        found = guesses(self.heads, context.hidden_BH, context.root_B, self.size, floor)
        rows = zip(tries, found.tokens_BC.tolist(), found.parents_BC.tolist(), found.logp_BC.tolist(), strict=True)
        for trie, tokens, parents, logp in rows:
            nodes = [ROOT]
            for token, parent, logp_path in zip(tokens[1:], parents[1:], logp[1:], strict=True):
                chance = math.exp(logp_path)
                # nodes below a guess that is left out are no likelier, and left out with it
                nodes.append(trie.add_guess(nodes[parent], token, chance) if chance >= floor else ROOT)


def guesses(heads: PathHeads, hidden_BH: Tensor, root_B: Tensor, size: int, floor: float = 0.0) -> Candidates:
    """The candidates for a tree of up to `size` nodes; nothing is asked below those of a chance under `floor`."""
    num_ranks = min(RANKS, size, heads.config.draft_vocab)
    return candidates(heads, hidden_BH, root_B, beam=min(BEAM, size), num_ranks=num_ranks, floor=floor)


def likeliest_of(found: Candidates, shape: DynamicShape) -> tuple[Tensor, Tensor]:
    """The `shape.size` likeliest candidates of each row behind the root [B, N], and which of them are no padding.

    With a floor, N is what the widest row needs: one host read.
    """
    # candidates follow their parents, so a stable sort keeps a parent in front of a child of equal chance
    score_BC, order_BC = found.logp_BC.sort(dim=1, descending=True, stable=True)
    taken_BN, score_BN = order_BC[:, : shape.size + 1], score_BC[:, : shape.size + 1]
    if not shape.floor:
        return taken_BN, score_BN > -torch.inf
    real_BN = score_BN >= math.log(shape.floor)
    width = int(real_BN.sum(1).max())
    return taken_BN[:, :width], real_BN[:, :width]


def likeliest(found: Candidates, shape: DynamicShape) -> Draft:
    """The tree of each row's likeliest candidates."""
    taken_BN, real_BN = likeliest_of(found, shape)
    places_BN = torch.arange(taken_BN.shape[1], device=taken_BN.device).expand_as(taken_BN)
    place_BC = torch.zeros_like(found.parents_BC).scatter_(1, taken_BN, places_BN)
    parents_BN = place_BC.gather(1, found.parents_BC.gather(1, taken_BN)) * real_BN
    ranks_BN = found.ranks_BC.gather(1, taken_BN) * real_BN
    return Draft(found.tokens_BC.gather(1, taken_BN), TokenTree(parents_BN, ranks_BN, real_BN))


@dataclass(frozen=True)
class _Level:
    """Nodes of one depth, and for each of them its parent's place in the level above and its rank."""

    nodes: list[int]
    parents: list[int]
    ranks: list[int]
    num_ranks: int
    last: bool


def _levels(tree: TokenTree) -> list[_Level]:
    """A fixed tree from the root's children down."""
    depths, parents, ranks = (each[0].tolist() for each in (tree.depths_XN, tree.parents_XN, tree.ranks_XN))
    above, levels = [0], []
    deepest = max(depths)
    for depth in range(1, deepest + 1):
        nodes = [node for node, at in enumerate(depths) if at == depth]
        ranks_of = [ranks[node] for node in nodes]
        places = [above.index(parents[node]) for node in nodes]
        levels.append(_Level(nodes, places, ranks_of, max(ranks_of) + 1, depth == deepest))
        above = nodes
    return levels
