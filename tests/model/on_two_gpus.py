"""A target whose layers lie on two GPUs, run on devices that only know shapes; `test_placing.py` runs this file.

A fake tensor has a shape, a dtype and the device it would be on, and refuses to meet one of another device: what runs
here puts every tensor where a machine with two GPUs needs it.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, attach_execution_device_hook
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import AutoModelForCausalLM

from medusa_cli.contracts import Draft, Verdict
from medusa_cli.heads.config import MedusaConfig
from medusa_cli.heads.medusa import MedusaHeads
from medusa_cli.model.identity import Identity
from medusa_cli.model.masks import mask_kinds
from medusa_cli.model.target import Target
from medusa_cli.trees.tree import TokenTree
from tests.tiny_folders import tiny_config

_setup_privateuseone_for_python_backend("gpus")
FIRST, SECOND = torch.device("gpus:0"), torch.device("gpus:1")


@pytest.fixture
def _shapes_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    make = torch.tensor

    def shape_of(data: Any, device: Any = None, **more: Any) -> torch.Tensor:
        known = make(data, **more)
        return torch.empty(known.shape, dtype=known.dtype, device=device)

    # fakes made of known numbers would be moved for real
    monkeypatch.setattr(torch, "tensor", shape_of)
    with FakeTensorMode():
        yield


def spread(model_type: str, attention: str = "sdpa") -> Target:
    """A model of three layers, two of them with norm and output on the second GPU, dispatched by accelerate's hooks."""
    model = AutoModelForCausalLM.from_config(
        tiny_config(model_type, num_hidden_layers=3, tie_word_embeddings=False),
        attn_implementation=attention,
        dtype=torch.float32,
    ).eval()
    where = {"model.embed_tokens": FIRST, "model.layers.0": FIRST, "model.rotary_emb": FIRST}
    where |= dict.fromkeys(("model.layers.1", "model.layers.2", "model.norm", "lm_head"), SECOND)
    for name, device in where.items():
        for module in model.get_submodule(name).modules():
            for own in (module._parameters, module._buffers):
                for key, tensor in own.items():
                    if tensor is None:
                        continue
                    moved = torch.empty(tensor.shape, device=device)
                    own[key] = nn.Parameter(moved) if own is module._parameters else moved
    for name, device in {"": FIRST, **where}.items():
        hook = AlignDevicesHook(device, io_same_device=not name, skip_keys=model._skip_keys_device_placement)
        add_hook_to_module(model.get_submodule(name), hook)
        if name:
            attach_execution_device_hook(model.get_submodule(name), device, model._skip_keys_device_placement)
    return Target(model, None, mask_kinds(model), frozenset(), Identity("spread", "x", "eager", attention))


@pytest.mark.usefixtures("_shapes_only")
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "mistral"])
def test_a_tree_is_verified_and_kept_by_layers_on_two_gpus(model_type: str) -> None:
    target = spread(model_type)
    assert (target.device, target.devices) == (FIRST, [FIRST, SECOND])
    cache = target.new_cache(2, 4)
    seen = target.prefill([[1, 2, 3], [4, 5]], cache)
    assert (seen.hidden_BNH.device, seen.logits_BNV.device) == (FIRST, FIRST)
    tree = TokenTree.from_paths([(0,), (1,), (0, 0), (1, 0)])
    seen = target.verify(Draft(torch.zeros(2, 5, dtype=torch.long, device=FIRST), tree), cache)
    assert (seen.hidden_BNH.device, seen.logits_BNV.device) == (FIRST, FIRST)
    paths = [[0, 2, 4], [0, 2, -1]]
    with torch.inference_mode():
        cache.keep(Verdict(torch.zeros(2, 3, dtype=torch.long, device=FIRST), None, None, paths, [3, 2]))
    assert {layer.keys.device for layer in cache.layers} == {FIRST, SECOND}
    assert target.hidden([[0] * 4, [0] * 3]).device == FIRST


@pytest.mark.usefixtures("_shapes_only")
def test_one_row_s_path_is_kept_on_two_gpus() -> None:
    target = spread("llama")
    cache = target.new_cache(1, 4)
    target.prefill([[1, 2, 3]], cache)
    target.verify(Draft(torch.zeros(1, 3, dtype=torch.long, device=FIRST), TokenTree.from_paths([(0,), (1,)])), cache)
    with torch.inference_mode():
        cache.keep(Verdict(torch.zeros(1, 2, dtype=torch.long, device=FIRST), None, None, [[0, 2]], [2]))
    assert cache.lengths == [5]


@pytest.mark.usefixtures("_shapes_only")
def test_heads_guess_on_the_first_gpu_where_the_output_matrix_is_on_the_second() -> None:
    target = spread("llama")
    config = MedusaConfig(
        num_heads=2, num_layers=1, hidden_size=32, vocab_size=97, draft_vocab=97, own_output=False, output_bias=False,
        sees_root=True, target_name="spread", target_fingerprint="x",
    )  # fmt: skip
    with torch.device(FIRST):
        heads = MedusaHeads(config, torch.zeros(97, dtype=torch.long))
    heads.root_rows = heads.shared_weight = target.output_weight
    inputs = heads.inputs(torch.zeros(1, 32, device=FIRST), torch.zeros(1, 1, dtype=torch.long, device=FIRST))
    assert heads(inputs).device == FIRST
