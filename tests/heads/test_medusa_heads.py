import pytest
import torch
from pydantic import ValidationError

from medusa_cli.errors import HeadsMismatch
from medusa_cli.heads.config import MedusaConfig
from medusa_cli.heads.medusa import MedusaHeads

HIDDEN, VOCAB, HEADS, WIDTH = 16, 50, 3, 20


def config(**changes) -> MedusaConfig:
    values = {
        "num_heads": HEADS,
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "draft_vocab": WIDTH,
        "own_output": False,
        "output_bias": False,
        "target_name": "tiny",
        "target_fingerprint": "abc",
    }
    return MedusaConfig(**{**values, **changes})


def draft_ids() -> torch.Tensor:
    return torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:WIDTH].sort().values


def output() -> torch.Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2))


def randomise(heads: MedusaHeads) -> MedusaHeads:
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.3)
    return heads


def num_parameters(heads: MedusaHeads) -> int:
    return sum(parameter.numel() for parameter in heads.parameters())


@pytest.mark.parametrize("own_output", [False, True])
def test_an_untrained_head_gives_the_target_s_own_logits(own_output):
    heads = MedusaHeads.fresh(config(own_output=own_output, num_layers=2), draft_ids(), output())
    hidden = torch.randn(5, HIDDEN)
    expected = (hidden @ output().T)[:, draft_ids()]
    for head in range(HEADS):
        torch.testing.assert_close(heads(hidden)[:, head], expected)


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("shape", [(HIDDEN,), (4, HIDDEN), (2, 3, HIDDEN)])
def test_the_batched_product_equals_one_head_and_one_block_at_a_time(num_layers, shape):
    heads = randomise(MedusaHeads.fresh(config(num_layers=num_layers), draft_ids(), output()))
    hidden = torch.randn(*shape)
    got = heads(hidden)
    assert got.shape == (*shape[:-1], HEADS, WIDTH)
    for head in range(HEADS):
        x = hidden
        for layer in range(num_layers):
            linear = x @ heads.weight[layer, head].T + heads.bias[layer, head]
            x = x + linear * torch.sigmoid(linear)
        torch.testing.assert_close(got[..., head, :], x @ output()[draft_ids()].T, rtol=1e-4, atol=1e-4)


def test_two_layers_double_the_parameters_and_share_nothing():
    one = MedusaHeads.fresh(config(num_layers=1), draft_ids(), output())
    two = MedusaHeads.fresh(config(num_layers=2), draft_ids(), output())
    assert num_parameters(two) == 2 * num_parameters(one)
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(two.parameters(), lr=1e-3)
    # from zero both layers' first gradients are equal: only the second step tells them apart
    for _ in range(2):
        optimizer.zero_grad()
        two(torch.randn(4, HIDDEN)).square().sum().backward()
        optimizer.step()
    assert not torch.equal(two.weight[0], two.weight[1])


def test_a_shared_output_is_neither_trained_nor_stored():
    heads = MedusaHeads.fresh(config(), draft_ids(), output())
    assert set(heads.state_dict()) == {"weight", "bias", "draft_ids"}
    assert num_parameters(heads) == HEADS * (HIDDEN * HIDDEN + HIDDEN)


def test_an_own_output_is_trained_and_stored_for_each_head():
    heads = MedusaHeads.fresh(config(own_output=True), draft_ids(), output())
    assert heads.state_dict()["output_weight"].shape == (HEADS, WIDTH, HIDDEN)
    assert heads.output_weight is not None
    assert heads.output_weight.requires_grad


@pytest.mark.parametrize("own_output", [False, True])
def test_an_output_bias_is_added(own_output):
    bias = torch.randn(VOCAB)
    heads = MedusaHeads.fresh(config(own_output=own_output, output_bias=True), draft_ids(), output(), bias)
    hidden = torch.randn(HIDDEN)
    expected = (output() @ hidden + bias)[draft_ids()]
    torch.testing.assert_close(heads(hidden)[1], expected)


def test_draft_indices_become_the_target_s_ids():
    heads = MedusaHeads.fresh(config(), draft_ids(), output())
    indices = torch.tensor([[0, 3], [19, 0]])
    assert torch.equal(heads.to_target_ids(indices), draft_ids()[indices])


def test_a_draft_vocabulary_of_the_first_rows_copies_no_matrix():
    matrix = output()
    heads = MedusaHeads.fresh(config(draft_vocab=VOCAB), torch.arange(VOCAB), matrix)
    assert heads.projection(0).weight_WH.data_ptr() == matrix.data_ptr()


def test_heads_keep_integer_ids_when_they_change_dtype():
    heads = MedusaHeads.fresh(config(), draft_ids(), output()).to(torch.bfloat16)
    assert heads(torch.randn(HIDDEN, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert heads.draft_ids.dtype == torch.int64


def test_binding_to_a_matrix_of_another_shape_names_both_shapes():
    heads = MedusaHeads(config(), draft_ids())
    with pytest.raises(HeadsMismatch, match="50 x 16, this model's is 51 x 16"):
        heads.bind(torch.zeros(51, HIDDEN))


def test_heads_with_an_output_bias_refuse_a_model_without_one():
    with pytest.raises(HeadsMismatch, match="output has a bias"):
        MedusaHeads(config(output_bias=True), draft_ids()).bind(output())


def test_a_draft_vocabulary_larger_than_the_vocabulary_is_refused():
    with pytest.raises(ValidationError, match="larger than the target's vocab_size"):
        config(draft_vocab=VOCAB + 1)


def test_untrained_heads_that_see_the_root_give_the_target_s_own_logits():
    heads = MedusaHeads.fresh(config(sees_root=True), draft_ids(), output())
    hidden, roots = torch.randn(5, HIDDEN), torch.randint(VOCAB, (5,))
    expected = (hidden @ output().T)[:, draft_ids()]
    torch.testing.assert_close(heads(heads.inputs(hidden, roots[:, None]))[:, 0], expected)


def test_heads_that_see_the_root_guess_by_it_and_others_do_not():
    hidden = torch.randn(HIDDEN).expand(2, -1)
    roots = torch.tensor([3, 4])
    for sees_root in (True, False):
        heads = randomise(MedusaHeads.fresh(config(sees_root=sees_root), draft_ids(), output()))
        one, other = heads(heads.inputs(hidden, roots[:, None]))
        assert torch.equal(one, other) != sees_root


def test_the_root_enters_the_first_block_as_its_normed_row_of_the_output_matrix():
    heads = randomise(MedusaHeads.fresh(config(sees_root=True, num_layers=2), draft_ids(), output()))
    hidden, root = torch.randn(HIDDEN), 7
    row = output()[root] / output()[root].square().mean().sqrt()
    got = heads.block_forward(heads.inputs(hidden, torch.tensor([root])))
    for head in range(HEADS):
        first = heads.weight[0, head] @ hidden + heads.bias[0, head] + heads.root_weight[head] @ row
        x = hidden + torch.nn.functional.silu(first)
        x = x + torch.nn.functional.silu(heads.weight[1, head] @ x + heads.bias[1, head])
        torch.testing.assert_close(got[head], x)


def test_packed_heads_guess_what_plain_ones_guess():
    heads = randomise(MedusaHeads.fresh(config(num_layers=2), draft_ids(), output())).requires_grad_(False)
    hidden = torch.randn(5, HIDDEN)
    plain = heads(hidden)
    torch.testing.assert_close(heads.pack(blocks=False)(hidden), plain)
    assert (
        heads.state_dict().keys() == MedusaHeads.fresh(config(num_layers=2), draft_ids(), output()).state_dict().keys()
    )
