"""Replaying what heads that see their path believed: the same as drafting at each place and reading on."""

import pytest
import torch

from medusa_cli.contracts import Context
from medusa_cli.drafters.hydra import HydraDrafter
from medusa_cli.train.corpus import Examples
from medusa_cli.train.dynamic_replay import beliefs_at
from medusa_cli.train.measure import rank_places
from medusa_cli.trees.dynamic import DynamicShape
from tests.drafters.test_hydra import HEADS, hydra_heads
from tests.train.conftest import VOCAB


@pytest.mark.parametrize("shape", [DynamicShape(4), DynamicShape(9, 0.05), DynamicShape(1)])
def test_a_replay_keeps_what_drafts_at_these_places_would_have_kept(corpus, output_weight, shape: DynamicShape) -> None:
    heads = hydra_heads(output=output_weight)
    examples = Examples.of(corpus, range(12), heads.draft_ids, HEADS)
    ranks = rank_places(heads, examples, num_ranks=8, chunk=64)
    played = beliefs_at(heads, examples, ranks, num_ranks=9, most=10_000).replay(shape)
    kept, sizes = [], []
    for row, place in enumerate(examples.places_N.tolist()):
        sample = int(corpus.sample_of(examples.places_N[row : row + 1])[0])
        if place + 1 + HEADS >= int(corpus.offsets_S[sample + 1]) or not corpus.supervised_T[place + 1]:
            continue
        root = torch.tensor([int(corpus.ids_T[place + 1])])
        context = Context([[int(root)]], root, torch.from_numpy(corpus.hidden_TH[place : place + 1]).float())
        draft = HydraDrafter(heads, shape).propose(context)
        node, depth = 0, 0
        while True:
            token = int(corpus.ids_T[place + 2 + depth]) if depth < HEADS else VOCAB
            children = [
                child
                for child in range(1, draft.tree.num_nodes)
                if draft.tree.real_XN[0, child]
                and int(draft.tree.parents_XN[0, child]) == node
                and int(draft.tokens_BN[0, child]) == token
            ]
            if not children:
                break
            node, depth = children[0], depth + 1
        kept.append(depth)
        sizes.append(int(draft.tree.real_XN.sum()))
    assert played.tokens == pytest.approx(1 + sum(kept) / len(kept))
    assert sum(nodes * count for nodes, count in played.sizes.items()) == sum(sizes)
