"""What a step costs is measured at several lengths of the text, over a cache that nobody had to read."""

import pytest
import torch

from medusa_cli.contracts import Draft, Seen
from medusa_cli.errors import TargetError
from medusa_cli.model.cache import TreeCache
from medusa_cli.model.costs import by_context
from medusa_cli.model.costs.by_context import measure_contexts, random_cache, read_bytes
from medusa_cli.trees.tree import TokenTree
from tests.tiny_models import target_of, tiny_model


def test_each_context_has_a_cost_for_each_number_of_nodes_and_the_bytes_it_reads() -> None:
    target = target_of(tiny_model("llama"))
    costs = measure_contexts(target, [4, 16], [1, 3], rounds=1)
    assert [cost.context for cost in costs] == [4, 16]
    assert all(set(cost.seconds) == {1, 3} and min(cost.seconds.values()) > 0 for cost in costs)
    assert [cost.cache_bytes for cost in costs] == [4 * target.cache_bytes_per_token, 16 * target.cache_bytes_per_token]


@torch.inference_mode()
def test_a_random_cache_is_read_as_a_text_of_that_length_would_be() -> None:
    target = target_of(tiny_model("llama"))
    cache = random_cache(target, 9, 2)
    assert cache.lengths == [9]
    draft = Draft(torch.tensor([[5, 6]]), TokenTree.chain(1))
    before = target.verify(draft, cache).logits_BNV
    cache.layers[0].values[:, :, 3] += 1.0
    assert not torch.equal(target.verify(draft, cache).logits_BNV, before), "a committed column is read"
    cache.layers[0].values[:, :, 3] -= 1.0
    cache.drop(0)
    cache.commit(slice(0, 1), [3])
    shorter = target.verify(draft, cache).logits_BNV
    cache.layers[0].values[:, :, 7] += 1.0
    assert torch.equal(target.verify(draft, cache).logits_BNV, shorter), "one past the text isn't"


def test_every_context_is_measured_with_its_own_length_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(tiny_model("llama"))
    seen = []
    real = target.verify

    def verify(draft: Draft, cache: TreeCache) -> Seen:
        seen.append((cache.lengths[0], draft.tree.num_nodes))
        return real(draft, cache)

    monkeypatch.setattr(target, "verify", verify)
    measure_contexts(target, [4, 16], [1, 3], rounds=2)
    assert seen == [(4, 1), (4, 3), (16, 1), (16, 3)] * 3


def test_rounds_end_when_patience_does(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(tiny_model("llama"))
    seen = []
    real = target.verify
    monkeypatch.setattr(target, "verify", lambda draft, cache: seen.append(1) or real(draft, cache))
    measure_contexts(target, [4], [1], rounds=50, patience_s=0.0)
    assert len(seen) == 2, "one to warm up and one that counts"


def test_nodes_have_positions_even_at_the_model_s_last_context() -> None:
    target = target_of(tiny_model("llama"))
    limit = target.context_limit
    assert limit is not None
    (cost,) = measure_contexts(target, [limit], [1, 4], rounds=1)
    assert cost.context == limit
    assert cost.cache_bytes == (limit - 4) * target.cache_bytes_per_token


def test_a_context_beyond_the_model_s_positions_is_refused_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(tiny_model("llama"))
    monkeypatch.setattr(by_context, "random_cache", None)
    with pytest.raises(TargetError, match=f"beyond the {target.context_limit} positions") as caught:
        measure_contexts(target, [4, target.context_limit + 1], [1, 4])
    assert str(target.context_limit) in caught.value.hint
    with pytest.raises(TargetError, match="leave no room"):
        measure_contexts(target, [4], [1, target.context_limit])


@pytest.mark.parametrize("attention", ["eager", "grouped"])
def test_a_window_is_all_that_is_read_where_attention_skips_the_rest(attention: str) -> None:
    target = target_of(tiny_model("mistral"), attention, "packed")
    window = target.kinds["sliding_attention"]
    assert window is not None
    cache = random_cache(target, 3 * window, 1)
    columns = window if target.attends_natively else 3 * window
    assert read_bytes(target, cache, 3 * window) == columns * target.cache_bytes_per_token


def test_a_long_context_is_not_read() -> None:
    target = target_of(tiny_model("llama"))
    read = []
    real = target.prefill
    target.prefill = lambda prompts, cache: read.append(len(prompts[0])) or real(prompts, cache)  # type: ignore[method-assign]
    random_cache(target, 60, 1)
    assert read == [1], "one token is read, to learn what keys and values look like"
