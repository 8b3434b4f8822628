"""States of inner layers: numbered as transformers numbers them, on every architecture and at every place."""

import pytest
import torch

from medusa_cli.contracts import Draft
from medusa_cli.errors import TargetError
from medusa_cli.trees.tree import TokenTree
from tests.attending import close, states_of
from tests.tiny_models import ARCHITECTURES, prompt_of, target_of, tiny_model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_number_i_is_what_transformers_calls_hidden_state_i(name: str) -> None:
    target = target_of(tiny_model(name), ARCHITECTURES[name].attentions[-1])
    widest = target.num_layers - (name == "opt")  # whose output sees fewer numbers than its layers
    taps = tuple(range(widest, -1, -1))
    prompts, nodes = [prompt_of(7), prompt_of(12)], [[5], [9]]
    cache = target.new_cache(2, 0)
    target.prefill(prompts, cache, taps=taps)
    read_BTLH = cache.read_taps(slice(0, 2))
    seen = target.verify(Draft(torch.tensor(nodes), TokenTree.empty()), cache, taps=taps)
    assert read_BTLH is not None
    assert seen.taps_BNLH is not None
    for row, prompt in enumerate(prompts):
        wanted_TLH = states_of(tiny_model(name), [*prompt, *nodes[row]], taps)
        close(read_BTLH[row, : len(prompt)], wanted_TLH[:-1])
        close(seen.taps_BNLH[row], wanted_TLH[-1:])


def test_states_of_two_widths_are_refused_in_words() -> None:
    layer_inputs = target_of(tiny_model("opt")).stock.layer_inputs
    layer_inputs.check((2,))
    layer_inputs.check((1, 0))
    with pytest.raises(TargetError, match="not as wide"):
        layer_inputs.check((2, 0))


def test_nothing_is_hooked_and_nothing_held_where_nobody_wants_to_see(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(tiny_model("llama"))
    monkeypatch.setattr(torch.nn.Module, "register_forward_pre_hook", None)
    cache = target.new_cache(1, 0)
    target.prefill([prompt_of(7)], cache)
    assert target.verify(Draft(torch.tensor([[5]]), TokenTree.empty()), cache).taps_BNLH is None
    assert cache.read_taps(slice(0, 1)) is None
    assert not cache.taps.is_initialized


def test_states_of_inner_layers_take_their_own_bytes() -> None:
    target = target_of(tiny_model("llama"))
    cache = target.new_cache(1, 0)
    target.prefill([prompt_of(7)], cache)
    before = cache.num_bytes()
    target.verify(Draft(torch.tensor([[5]]), TokenTree.empty()), cache, taps=(0, 2))
    assert cache.num_bytes() - before == cache.taps.capacity * 2 * target.hidden_size * 4
