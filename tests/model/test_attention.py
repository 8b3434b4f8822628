"""Grouped attention gives the library's numbers, and is chosen only where it knows all the model's attention does."""

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from medusa_cli.model.attention import FOLD_UP_TO, NAME, grouped_attention, register
from medusa_cli.model.loading.load import choose_attention
from tests.tiny_models import ARCHITECTURES, final_hidden, prompt_of, target_of, tiny_model

COLUMNS = 21


class Layer(nn.Module):
    """What the library's attention reads of the layer that calls it."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups
        self.is_causal = True


def inputs(num_rows: int, num_heads: int, key_heads: int, num_tokens: int, width: int = 8) -> tuple[Tensor, ...]:
    query = torch.randn(num_rows, num_heads, num_tokens, width)
    key, value = torch.randn(2, num_rows, key_heads, COLUMNS, width).unbind()
    hidden = torch.rand(num_rows, 1, num_tokens, COLUMNS) < 0.4
    hidden[..., 0] = False
    return query, key, value, torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("num_tokens", [1, 2, 20])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize(("num_heads", "key_heads"), [(4, 2), (6, 1), (4, 4)])
def test_folded_heads_give_the_numbers_of_repeated_keys(
    num_heads: int, key_heads: int, num_rows: int, num_tokens: int
) -> None:
    query, key, value, mask = inputs(num_rows, num_heads, key_heads, num_tokens)
    layer = Layer(num_heads // key_heads)
    # one mask for all rows, as a tree that all rows share has
    for each in (mask, mask[:1]):
        found, _ = grouped_attention(layer, query, key, value, each, scaling=0.3)
        wanted, _ = sdpa_attention_forward(layer, query, key, value, each, scaling=0.3)
        assert found.shape == (num_rows, num_tokens, num_heads, 8)
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


def test_a_value_may_be_wider_or_narrower_than_a_key() -> None:
    query, key, value, mask = inputs(2, 4, 2, 3)
    found, _ = grouped_attention(Layer(2), query, key, value[..., :5], mask, scaling=0.3)
    wanted, _ = grouped_attention(Layer(2), query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(found, wanted[..., :5])


@pytest.mark.parametrize("num_tokens", [FOLD_UP_TO, FOLD_UP_TO + 1])
def test_long_queries_give_the_same_numbers_on_either_side_of_the_threshold(num_tokens: int) -> None:
    query, key, value, mask = inputs(1, 4, 2, num_tokens)
    found, _ = grouped_attention(Layer(2), query, key, value, mask, scaling=0.3)
    wanted, _ = sdpa_attention_forward(Layer(2), query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


def test_without_a_mask_it_is_the_library_s_own() -> None:
    query, key, value, _ = inputs(2, 4, 2, 1)
    found, _ = grouped_attention(Layer(2), query, key, value, None)
    wanted, _ = sdpa_attention_forward(Layer(2), query, key, value, None)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("attention", ["sdpa", "grouped"])
def test_a_model_computes_the_same_under_each_attention(attention: str) -> None:
    ids = prompt_of(19)
    found = target_of(tiny_model("llama"), attention).hidden([ids])[0]
    torch.testing.assert_close(found, final_hidden(tiny_model("llama"), ids), atol=1e-4, rtol=1e-4)


def test_registering_twice_is_registering_once() -> None:
    assert register() == register() == NAME


@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss", "vaultgemma", "granite_swa", "mimo_v2_flash"])
@pytest.mark.parametrize("wanted", ["auto", "grouped"])
def test_attention_with_caps_or_sinks_stays_eager(wanted: str, model_type: str) -> None:
    assert choose_attention(wanted, AutoConfig.for_model(model_type)) == "eager"


@pytest.mark.parametrize("wanted", ["auto", "grouped"])
def test_a_model_with_attention_code_of_its_own_keeps_it(wanted: str) -> None:
    assert choose_attention(wanted, AutoConfig.for_model("falcon")) == "sdpa"


@pytest.mark.parametrize("wanted", ["auto", "grouped"])
@pytest.mark.parametrize("model_type", ["llama", "gemma3", "gpt2", "mixtral", "cohere2"])
def test_plain_attention_is_grouped(model_type: str, wanted: str) -> None:
    assert choose_attention(wanted, AutoConfig.for_model(model_type)) == NAME


@pytest.mark.parametrize("wanted", ["eager", "sdpa"])
def test_attention_asked_for_by_name_is_taken(wanted: str) -> None:
    assert choose_attention(wanted, AutoConfig.for_model("llama")) == wanted


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_laws_cover_the_attention_that_would_be_chosen(name: str) -> None:
    chosen = choose_attention("auto", tiny_model(name).config)
    assert chosen.removeprefix("medusa_") in ARCHITECTURES[name].attentions
