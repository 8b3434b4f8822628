"""Dynamic trees: the heads' confidence decides the shape, never the text."""

import pytest
import torch

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.contracts import Context
from medusa_cli.decode.loop import Parts, collect
from medusa_cli.decode.rows import Limits
from medusa_cli.drafters.medusa import MedusaDrafter
from medusa_cli.errors import TreeError
from medusa_cli.heads.config import MedusaConfig
from medusa_cli.heads.medusa import MedusaHeads
from medusa_cli.trees.dynamic import DynamicShape
from tests.tiny_models import NUM_NEW, known, target_of, tiny_model


def random_heads(target, sees_root: bool = True) -> MedusaHeads:
    config = MedusaConfig(
        num_heads=3,
        num_layers=1,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab=40,
        own_output=False,
        output_bias=False,
        sees_root=sees_root,
        target_name="tiny",
        target_fingerprint="x",
    )
    heads = MedusaHeads.fresh(config, torch.arange(40), target.output_weight)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.5)
    return heads.requires_grad_(False)


def context_of(num_rows: int, hidden_size: int) -> Context:
    roots_B = torch.arange(num_rows) + 5
    return Context([[root] for root in roots_B.tolist()], roots_B, torch.randn(num_rows, hidden_size))


@pytest.mark.parametrize("floor", [0.0, 0.05, 0.9])
@pytest.mark.parametrize("max_rows", [1, 3])
def test_the_text_is_the_plain_one_whatever_the_heads_believe(floor: float, max_rows: int) -> None:
    texts = known("llama")
    target = target_of(tiny_model("llama"))
    drafter = MedusaDrafter(random_heads(target), DynamicShape(9, floor))
    found = collect(Parts(target, drafter, Greedy()), texts.prompts, Limits(NUM_NEW), max_rows)
    for one, prompt, text in zip(found, texts.prompts, texts.texts, strict=True):
        assert one.token_ids == text[len(prompt) : len(prompt) + NUM_NEW]


def test_the_nodes_are_the_likeliest_paths_of_each_row() -> None:
    target = target_of(tiny_model("llama"))
    heads = random_heads(target)
    context = context_of(2, target.hidden_size)
    draft = MedusaDrafter(heads, DynamicShape(6)).propose(context)
    logp_BKW = heads(heads.inputs(context.hidden_BH, context.root_B[:, None])).log_softmax(-1)
    for row in range(2):
        first = logp_BKW[row, 0].argmax()
        assert int(draft.tokens_BN[row, 0]) == int(context.root_B[row])
        assert int(heads.to_target_ids(first)) in draft.tokens_BN[row, 1:].tolist()
        for node in range(1, 7):
            depth, parent = int(draft.tree.depths_XN[row, node]), int(draft.tree.parents_XN[row, node])
            ranked = heads.to_target_ids(logp_BKW[row, depth - 1].topk(6).indices)
            assert int(draft.tokens_BN[row, node]) == int(ranked[draft.tree.ranks_XN[row, node]])
            assert int(draft.tree.depths_XN[row, parent]) == depth - 1


def test_a_high_floor_leaves_the_root_alone_and_a_lower_one_more_nodes() -> None:
    target = target_of(tiny_model("llama"))
    heads, context = random_heads(target), context_of(3, target.hidden_size)
    sizes = [
        MedusaDrafter(heads, DynamicShape(9, floor)).propose(context).tree.num_nodes
        for floor in (0.9999, 0.2, 0.02, 0.0)
    ]
    assert sizes[0] == 1
    assert sizes == sorted(sizes)
    assert sizes[-1] == 10


def test_a_node_below_the_floor_is_padding_where_another_row_is_wider() -> None:
    logp_BKR = torch.tensor([[[0.9, 0.05]], [[0.4, 0.3]]]).log()
    from medusa_cli.trees.dynamic import dynamic_tree

    tree = dynamic_tree(logp_BKR, size=2, floor=0.1)
    assert tree.real_XN.tolist() == [[True, True, False], [True, True, True]]


@pytest.mark.parametrize(
    "spec",
    ["dynamic", "dynamic:", "dynamic:0", "dynamic:x", "dynamic:8:1", "dynamic:8:-1", "dynamic:1:2:3", "dynamic:9999"],
)
def test_a_bad_spec_is_refused_in_words(spec: str) -> None:
    with pytest.raises(TreeError, match="dynamic"):
        DynamicShape.parse(spec)


def test_a_spec_is_read() -> None:
    assert DynamicShape.parse("dynamic:16:0.05") == DynamicShape(16, 0.05)
    assert DynamicShape.parse("chain:4") is None
