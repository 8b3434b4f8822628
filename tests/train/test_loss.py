"""The hand-written loss and gradient against torch's own, and their appetite for memory."""

import pytest
import torch
import torch.nn.functional as F

from medusa_cli.heads.config import MedusaConfig
from medusa_cli.heads.medusa import MedusaHeads
from medusa_cli.train.corpus import NOT_ASKED, OUTSIDE
from medusa_cli.train.loss import combine, score, score_and_learn

HIDDEN, HEADS, DECAY = 16, 3, 0.7
DRAFT = list(range(0, 50, 2))


def batch(num_places: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    labels_BK = torch.randint(len(DRAFT), (num_places, HEADS))
    labels_BK[torch.rand(num_places, HEADS) < 0.2] = OUTSIDE
    labels_BK[torch.rand(num_places, HEADS) < 0.2] = NOT_ASKED
    return torch.randn(num_places, HIDDEN), labels_BK


def randomise(heads: MedusaHeads) -> MedusaHeads:
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return heads


def plain_loss(heads: MedusaHeads, hidden_BH: torch.Tensor, labels_BK: torch.Tensor) -> torch.Tensor:
    logits = heads(hidden_BH)
    losses = [
        F.cross_entropy(logits[:, head][labels_BK[:, head] >= 0], labels_BK[:, head][labels_BK[:, head] >= 0])
        for head in range(HEADS)
    ]
    return sum(DECAY**head * loss for head, loss in enumerate(losses))


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize(("own_output", "output_bias"), [(False, False), (False, True), (True, False), (True, True)])
def test_loss_and_gradient_equal_torch_s_own_whatever_the_chunk(make_heads, chunk, own_output, output_bias):
    heads = randomise(make_heads(draft_ids=DRAFT, own_output=own_output, output_bias=output_bias, num_layers=2))
    hidden_BH, labels_BK = batch()
    expected = plain_loss(heads, hidden_BH, labels_BK)
    expected.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in heads.named_parameters()}
    heads.zero_grad(set_to_none=True)
    scores = score_and_learn(heads, hidden_BH, labels_BK, head_decay=DECAY, chunk=chunk)
    torch.testing.assert_close(scores.loss, expected.detach())
    for name, parameter in heads.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)
    without = score(heads, hidden_BH, labels_BK, head_decay=DECAY, chunk=chunk)
    torch.testing.assert_close(without.loss, scores.loss)


@pytest.mark.parametrize("output_bias", [False, True])
def test_a_shared_output_laid_out_for_the_cpu_teaches_the_same_and_is_not_saved(make_heads, output_bias):
    plain, packed = (randomise(make_heads(draft_ids=DRAFT, output_bias=output_bias, num_layers=2)) for _ in range(2))
    packed.pack_output()
    assert packed.packed_output is not None
    for heads in (plain, packed):
        scores = score_and_learn(heads, *batch(), head_decay=DECAY, chunk=7)
        assert float(scores.loss) == pytest.approx(float(plain_loss(plain, *batch()).detach()))
    for one, other in zip(plain.parameters(), packed.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)
    assert packed.state_dict().keys() == plain.state_dict().keys()


def test_heads_bound_to_another_matrix_forget_what_was_laid_out_of_the_one_before(make_heads):
    heads = randomise(make_heads())
    config = heads.config
    heads.pack_output()
    other_VH = torch.randn(config.vocab_size, config.hidden_size, generator=torch.Generator().manual_seed(3))
    heads.bind(other_VH, torch.zeros(config.vocab_size) if config.output_bias else None)
    wanted = torch.nn.functional.linear(torch.ones(config.hidden_size), other_VH[heads.draft_ids])
    torch.testing.assert_close(heads.projection(0).logits(torch.ones(1, config.hidden_size))[0], wanted)


def test_an_output_that_learns_is_not_laid_out_anew(make_heads):
    assert make_heads(own_output=True).pack_output().packed_output is None


def test_accuracy_counts_best_guesses_over_the_pairs_asked(make_heads):
    heads = randomise(make_heads(draft_ids=DRAFT))
    hidden_BH, labels_BK = batch()
    labels_BK[:10] = heads(hidden_BH[:10]).argmax(-1)
    scores = score(heads, hidden_BH, labels_BK, head_decay=DECAY, chunk=8)
    asked = labels_BK >= 0
    right = (heads(hidden_BH).argmax(-1) == labels_BK) & asked
    assert torch.equal(scores.right_K, right.sum(0))
    assert torch.equal(scores.count_K, asked.sum(0))
    torch.testing.assert_close(scores.top1_K, right.sum(0) / asked.sum(0))


@pytest.mark.parametrize("own_output", [False, True])
def test_a_batch_with_nothing_to_learn_costs_zero_and_moves_nothing(make_heads, own_output):
    heads = make_heads(draft_ids=DRAFT, own_output=own_output)
    hidden_BH, labels_BK = batch()
    scores = score_and_learn(heads, hidden_BH, torch.full_like(labels_BK, NOT_ASKED), head_decay=DECAY, chunk=8)
    assert float(scores.loss) == 0
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in heads.parameters())


def test_one_head_with_nothing_to_learn_leaves_the_others_as_they_are(make_heads):
    heads = randomise(make_heads(draft_ids=DRAFT))
    hidden_BH, labels_BK = batch()
    whole = score(heads, hidden_BH, labels_BK, head_decay=DECAY, chunk=8)
    labels_BK[:, 1] = OUTSIDE
    part = score(heads, hidden_BH, labels_BK, head_decay=DECAY, chunk=8)
    torch.testing.assert_close(part.loss, whole.loss - DECAY * whole.loss_K[1])
    assert part.loss_K[1] == 0


def test_a_token_the_model_rules_out_costs_much_but_not_infinity(make_heads):
    heads = make_heads()
    hidden_BH = heads.projection(0).weight_WH[3:4] * 1000
    worst = int(heads(hidden_BH)[0, 0].argmin())
    scores = score(heads, hidden_BH, torch.full((1, HEADS), worst), head_decay=1.0, chunk=8)
    logits = heads(hidden_BH)[0, 0]
    assert float(scores.loss_K[0]) > 1000
    torch.testing.assert_close(scores.loss_K[0], logits.logsumexp(0) - logits[worst])


def test_scores_of_parts_combine_to_the_scores_of_the_whole(make_heads):
    heads = randomise(make_heads(draft_ids=DRAFT))
    hidden_BH, labels_BK = batch()
    whole = score(heads, hidden_BH, labels_BK, head_decay=DECAY, chunk=8)
    cuts = [slice(0, 13), slice(13, 40)]
    parts = [score(heads, hidden_BH[cut], labels_BK[cut], head_decay=DECAY, chunk=8) for cut in cuts]
    torch.testing.assert_close(combine(parts, DECAY).loss, whole.loss)


@pytest.mark.parametrize("own_output", [False, True])
def test_memory_grows_with_the_chunk_and_not_with_heads_and_places(largest_tensor, own_output):
    vocab, hidden = 20_000, 4

    def largest(num_heads: int, num_places: int, chunk: int) -> int:
        config = MedusaConfig(
            num_heads=num_heads,
            num_layers=1,
            hidden_size=hidden,
            vocab_size=vocab,
            draft_vocab=vocab,
            own_output=own_output,
            output_bias=False,
            target_name="wide",
            target_fingerprint="abc",
        )
        heads = MedusaHeads.fresh(config, torch.arange(vocab), torch.zeros(vocab, hidden))
        labels_BK = torch.zeros(num_places, num_heads, dtype=torch.long)
        return largest_tensor(
            lambda: score_and_learn(heads, torch.zeros(num_places, hidden), labels_BK, head_decay=0.8, chunk=chunk)
        )

    assert largest(1, 32, 8) == largest(4, 64, 8) == 8 * vocab
    assert largest(4, 64, 16) == 16 * vocab


def test_a_loss_over_no_label_is_no_loss(make_heads):
    heads = randomise(make_heads(draft_ids=DRAFT, num_layers=1))
    hidden_BH, labels_BK = batch()
    labels_BK[:, 1] = OUTSIDE
    scores = score(heads, hidden_BH, labels_BK, head_decay=DECAY, chunk=8)
    assert scores.mean_loss == pytest.approx(float(scores.loss))
    assert [loss is None for loss in scores.mean_loss_K] == [False, True, False]
    nothing = score(heads, hidden_BH, torch.full_like(labels_BK, NOT_ASKED), head_decay=DECAY, chunk=8)
    assert nothing.mean_loss is None
    assert nothing.mean_loss_K == [None] * HEADS
