"""Weights are counted as they are held, whatever holds them."""

import pytest

from medusa_cli.model.weights import held_bytes, num_weights, step_bytes
from tests.tiny_models import quantised_model, target_of, tiny_model


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_packed_layers_have_as_many_numbers_as_plain_ones_biases_included(name: str) -> None:
    plain, packed = (target_of(tiny_model(name), runner=runner) for runner in ("eager", "packed"))
    assert num_weights(packed) == num_weights(plain)
    assert held_bytes(plain) == 4 * num_weights(plain)
    tied = plain.model.get_input_embeddings().weight.numel() if plain.config.tie_word_embeddings else 0
    assert held_bytes(packed) == held_bytes(plain) + 4 * tied


def test_weights_that_a_step_reads_are_counted_as_they_are_held() -> None:
    plain = target_of(tiny_model("llama"))
    numbers = sum(parameter.numel() for parameter in plain.model.parameters())
    embeddings = plain.model.get_input_embeddings().weight.numel()
    tied = plain.config.tie_word_embeddings
    assert step_bytes(plain) == 4 * (numbers if tied else numbers - embeddings)
    assert step_bytes(target_of(tiny_model("llama"), runner="packed")) == step_bytes(plain)


def test_weights_in_blocks_count_their_few_bits() -> None:
    plain = step_bytes(target_of(quantised_model()))
    blocks = target_of(quantised_model(), "grouped", "blocks")
    assert step_bytes(blocks) < 0.6 * plain
