"""Target: a tree forward shows what plain forwards over its paths show, for every architecture."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from medusa_cli.config.recipe import TargetSettings
from medusa_cli.contracts import Draft
from medusa_cli.errors import TargetError
from medusa_cli.model.loading.load import make_target, stop_ids_of
from medusa_cli.model.masks import mask_kinds
from medusa_cli.model.target import Target
from medusa_cli.trees.tree import TokenTree
from tests.fakes import WIDE_PATHS
from tests.tiny_models import ARCHITECTURES, VOCAB, WINDOW, final_hidden, prompt_of, target_of, tiny_model

cached_target = functools.cache(lambda name: target_of(tiny_model(name)))
PROMPTS = [prompt_of(13), prompt_of(4)]


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=2e-4)


def leaf_lines(tree: TokenTree) -> list[list[int]]:
    """Nodes from the root down to each leaf."""
    parents = tree.parents_XN[0].tolist()
    lines = []
    for leaf in set(range(tree.num_nodes)) - set(parents[1:]):
        line = [leaf]
        while line[0]:
            line.insert(0, parents[line[0]])
        lines.append(line)
    return lines


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_tree_forward_equals_the_forwards_of_its_paths(name: str) -> None:
    target, model = cached_target(name), tiny_model(name)
    tree = TokenTree.from_paths(WIDE_PATHS)
    tokens_BN = torch.randint(0, VOCAB, (2, tree.num_nodes))
    cache = target.new_cache(2, 0)
    target.prefill(PROMPTS, cache)
    seen = target.verify(Draft(tokens_BN, tree), cache)
    assert seen.logits_BNV.shape == (2, tree.num_nodes, VOCAB)
    lines = leaf_lines(tree)
    for row, prompt in enumerate(PROMPTS):
        for line in lines if row == 0 else lines[:2]:
            ids = prompt + tokens_BN[row, line].tolist()
            close(seen.logits_BNV[row, line], model(torch.tensor([ids])).logits[0, len(prompt) :])
            close(seen.hidden_BNH[row, line], final_hidden(model, ids)[len(prompt) :])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_hidden_states_of_padded_rows_are_those_of_single_texts(name: str) -> None:
    target, model = cached_target(name), tiny_model(name)
    found = target.hidden(PROMPTS)
    assert found.shape == (2, 13, target.hidden_size)
    for row, prompt in enumerate(PROMPTS):
        close(found[row, : len(prompt)], final_hidden(model, prompt))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_output_matrix_is_the_model_s(name: str) -> None:
    output = tiny_model(name).get_output_embeddings()
    for runner in ("eager", "packed"):
        target = target_of(tiny_model(name), runner=runner)
        assert torch.equal(target.output_weight, output.weight)
        assert (target.vocab_size, target.hidden_size) == tuple(output.weight.shape)
        if output.bias is None:
            assert target.output_bias is None
        else:
            assert torch.equal(target.output_bias, output.bias)


def test_some_architectures_have_an_output_bias_and_a_width_of_their_own() -> None:
    assert cached_target("phi").output_bias is not None
    # OPT projects its hidden states before the output matrix
    assert cached_target("opt").hidden_size == 24 != cached_target("opt").config.hidden_size


def test_a_prefill_shows_each_prompt_s_last_position_and_commits_the_prompts() -> None:
    target, model = cached_target("llama"), tiny_model("llama")
    cache = target.new_cache(3, 0)
    target.prefill([prompt_of(9)], cache)
    seen = target.prefill(PROMPTS, cache, first_row=1)
    assert cache.lengths == [9, 13, 4]
    assert seen.logits_BNV.shape == (2, 1, VOCAB)
    for row, prompt in enumerate(PROMPTS):
        close(seen.logits_BNV[row, 0], model(torch.tensor([prompt])).logits[0, -1])
        close(seen.hidden_BNH[row, 0], final_hidden(model, prompt)[-1])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_beginning_that_another_row_holds_is_not_read_again(name: str) -> None:
    target, model = cached_target(name), tiny_model(name)
    shared = prompt_of(9)
    prompts = [shared + [3, 1, 4], shared + [5]]
    cache = target.new_cache(3, 0)
    target.prefill([shared + [2, 7]], cache)
    cache.copy_prefix(0, slice(1, 3), len(shared))
    seen = target.prefill(prompts, cache, first_row=1)
    assert cache.lengths == [11, 12, 10]
    for row, prompt in enumerate(prompts):
        close(seen.logits_BNV[row, 0], model(torch.tensor([prompt])).logits[0, -1])


def test_verifying_commits_nothing_and_can_be_repeated() -> None:
    target = cached_target("gemma3_text")
    cache = target.new_cache(2, 0)
    target.prefill(PROMPTS, cache)
    draft = Draft(torch.randint(0, VOCAB, (2, 5)), TokenTree.chain(4))
    first = target.verify(draft, cache).logits_BNV.clone()
    target.verify(Draft(torch.zeros_like(draft.tokens_BN), draft.tree), cache)
    assert cache.lengths == [13, 4]
    assert torch.equal(target.verify(draft, cache).logits_BNV, first)


def test_padding_of_the_output_matrix_is_not_real_vocabulary() -> None:
    assert cached_target("llama").real_vocab == VOCAB
    for known_ids, wanted in ((VOCAB - 7, VOCAB - 7), (VOCAB + 7, VOCAB)):
        tokenizer = type("Tokenizer", (), {"eos_token_id": None, "__len__": lambda self, ids=known_ids: ids})()
        assert target_of(tiny_model("llama"), tokenizer=tokenizer).real_vocab == wanted


def test_the_context_limit_is_the_model_s() -> None:
    assert {cached_target(name).context_limit for name in ("llama", "gpt2", "opt")} == {96}


def test_the_fingerprint_tells_weights_apart_and_not_how_they_are_held() -> None:
    model = tiny_model("llama")
    held = [target_of(model, attention, runner) for attention, runner in (("eager", "eager"), ("grouped", "packed"))]
    assert held[0].fingerprint == held[1].fingerprint
    assert held[0].fingerprint != cached_target("qwen3").fingerprint
    assert [(each.identity.attention, each.identity.runner) for each in held] == [
        ("eager", "eager"),
        ("medusa_grouped", "packed"),
    ]


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("llama", {"full_attention": None}),
        ("mistral", {"sliding_attention": WINDOW}),
        ("gemma3_text", {"full_attention": None, "sliding_attention": WINDOW}),
        ("gpt2", {"full_attention": None}),
    ],
)
def test_windows_are_read_off_the_model(name: str, kinds: dict[str, int | None]) -> None:
    assert mask_kinds(tiny_model(name)) == kinds


def test_a_window_that_is_switched_off_is_no_window() -> None:
    assert mask_kinds(tiny_model("mistral", sliding_window=None)) == {"full_attention": None}


def test_all_stop_ids_count() -> None:
    # vllm#4180, transformers#31362
    owner = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[5, 7]))
    assert stop_ids_of(owner, SimpleNamespace(eos_token_id=9)) == {5, 7, 9}
    owner.generation_config.eos_token_id = 0
    assert stop_ids_of(owner, None) == {0}
    assert stop_ids_of(SimpleNamespace(), SimpleNamespace(eos_token_id=None)) == frozenset()


def made(model_type: str, **settings: Any) -> Target:
    config = AutoConfig.for_model(model_type, vocab_size=VOCAB, hidden_size=32, **settings)
    model = AutoModelForCausalLM.from_config(config)
    return make_target(model, None, TargetSettings(model=f"a-{model_type}"))


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("bloom", {"n_layer": 1, "n_head": 4}),
        ("mpt", {"d_model": 32, "n_layers": 1, "n_heads": 4}),
        ("falcon", {"alibi": True, "num_hidden_layers": 1, "num_attention_heads": 4}),
    ],
)
def test_a_model_without_positions_is_refused_by_name(model_type: str, settings: dict[str, Any]) -> None:
    with pytest.raises(TargetError, match=f"a-{model_type} .* takes no position ids"):
        made(model_type, **settings)


@pytest.mark.parametrize("model_type", ["bert", "roberta"])
def test_an_encoder_is_refused_by_name(model_type: str) -> None:
    with pytest.raises(TargetError, match=f"a-{model_type} .* is an encoder"):
        made(model_type, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, max_position_embeddings=32)
