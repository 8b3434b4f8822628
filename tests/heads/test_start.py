import pytest
import torch

from medusa_cli.errors import HeadsMismatch
from medusa_cli.heads.config import HydraConfig
from medusa_cli.heads.medusa import HydraHeads, MedusaHeads
from medusa_cli.heads.start import take_over
from tests.heads.test_medusa_heads import HIDDEN, config, draft_ids, output, randomise

SEEN = {"sees_root": True}


def made(**changes) -> MedusaHeads:
    return MedusaHeads.fresh(config(**SEEN, **changes), draft_ids(), output())


def logits(heads: MedusaHeads) -> torch.Tensor:
    torch.manual_seed(4)
    hidden, paths = torch.randn(6, HIDDEN), torch.randint(0, 50, (6, 4))
    return heads(heads.inputs(hidden, paths[:, : heads.config.num_heads]))


def test_hydra_heads_begin_by_guessing_what_the_medusa_heads_guess():
    source, described = randomise(made()), config(**SEEN).model_dump()
    heads = HydraHeads.fresh(HydraConfig(**{**described, "type": "hydra"}), draft_ids(), output())
    found = take_over(heads, source)
    assert found.new == ["path_weight"]
    torch.testing.assert_close(logits(heads), logits(source))


@pytest.mark.parametrize(("ours", "theirs"), [(4, 3), (2, 3)])
def test_heads_that_both_have_guess_the_same_and_others_are_untrained(ours: int, theirs: int):
    source, heads = randomise(made(num_heads=theirs)), made(num_heads=ours)
    take_over(heads, source)
    both = min(ours, theirs)
    torch.testing.assert_close(logits(heads)[:, :both], logits(source)[:, :both])
    assert not heads.weight[:, both:].any()


def test_a_layer_more_changes_no_guess():
    source, heads = randomise(made()), made(num_layers=2)
    take_over(heads, source)
    torch.testing.assert_close(logits(heads), logits(source))


def test_rows_of_an_own_output_are_left_out_for_another_draft_vocabulary():
    source = randomise(made(own_output=True))
    others = (draft_ids() + 1).clamp(max=49).unique()
    heads = MedusaHeads.fresh(config(**SEEN, own_output=True, draft_vocab=len(others)), others, output())
    before = heads.output_weight.clone()
    assert take_over(heads, source).new == ["output_weight"]
    assert torch.equal(heads.output_weight, before)
    same = made(own_output=True)
    assert take_over(same, source).new == []
    assert torch.equal(same.output_weight, source.output_weight)


def test_heads_of_another_hidden_size_are_refused_with_both_sizes():
    other = MedusaHeads(config(hidden_size=8), draft_ids())
    with pytest.raises(HeadsMismatch, match="of 8 .* of 16"):
        take_over(made(), other)
