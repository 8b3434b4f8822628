"""The forward that is recorded, on a GPU that only knows shapes; `test_graphs_on_a_gpu.py` runs this file.

A recording knows addresses on the GPU alone. What the host makes while it is recorded, or is told, would stay as it was
then: no operation may take a tensor of the CPU, but for single numbers, which are in the call itself.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import AutoConfig, AutoModelForCausalLM

from medusa_cli.model import attention as grouped
from medusa_cli.model.identity import Identity
from medusa_cli.model.loading.load import mask_kinds
from medusa_cli.model.runners.cuda_graphs import Bucket, Inputs
from medusa_cli.model.target import Target
from tests.tiny_models import ARCHITECTURES

_setup_privateuseone_for_python_backend("gpus")
GPU = torch.device("gpus:0")
BUCKET = Bucket(3, 8, 256)


class OnTheGpuAlone(TorchDispatchMode):
    """Refuses operations that take something from the host."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        results = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        taken = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        from_host = any(each.device.type == "cpu" and each.dim() for each in taken)
        if from_host and any(each.device == GPU for each in [*results, *taken]):
            raise RuntimeError(f"{function.name()} brings a tensor of the host to the GPU")
        if any(each.device == GPU for each in taken) and any(each.device.type == "cpu" for each in results):
            raise RuntimeError(f"{function.name()} brings something to the host")
        return found


@pytest.fixture
def _shapes_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    make = torch.tensor

    def of_the_host(data: Any, device: Any = None, **more: Any) -> Tensor:
        assert device is None or torch.device(device).type == "cpu", "numbers of the host, copied to the GPU"
        return make(data, **more)

    monkeypatch.setattr(torch, "tensor", of_the_host)
    with FakeTensorMode():
        yield


def on_the_gpu(name: str, attention: str) -> Target:
    """A tiny model of this architecture, every tensor of it on the GPU."""
    settings = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **ARCHITECTURES[name].settings}
    config = AutoConfig.for_model(ARCHITECTURES[name].model_type, **settings)
    used = grouped.register() if attention == "grouped" else attention
    model = AutoModelForCausalLM.from_config(config, attn_implementation=used, dtype=torch.bfloat16).eval()
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for key, tensor in own.items():
                if tensor is not None:
                    moved = torch.empty(tensor.shape, dtype=tensor.dtype, device=GPU)
                    own[key] = nn.Parameter(moved, requires_grad=False) if own is module._parameters else moved
    return Target(model, None, mask_kinds(model), frozenset(), Identity(name, "x", "graphs", used))


LACKING = {"falcon"}  # splits its heads by an operation that devices of shapes alone don't have
CASES = [
    ("llama", "eager"),
    ("llama", "sdpa"),
    *((name, found.attentions[-1]) for name, found in ARCHITECTURES.items() if name not in LACKING),
]


@pytest.mark.usefixtures("_shapes_only")
@pytest.mark.parametrize(("name", "attention"), CASES)
def test_what_is_recorded_takes_nothing_from_the_host(name: str, attention: str) -> None:
    target = on_the_gpu(name, attention)
    inputs = Inputs(BUCKET, GPU)
    cache = target.new_cache(BUCKET.rows, BUCKET.columns)
    target.at(inputs, cache)  # makes keys and values
    with OnTheGpuAlone():
        seen = target.at(inputs, cache)
    assert (seen.hidden_BNH.device, seen.logits_BNV.device) == (GPU, GPU)
    assert seen.logits_BNV.shape[:2] == (BUCKET.rows, BUCKET.nodes)


@pytest.mark.usefixtures("_shapes_only")
def test_the_guard_sees_what_comes_from_the_host_and_what_is_asked_of_it() -> None:
    number = torch.ones(2, device=GPU)
    with pytest.raises(AssertionError, match="copied to the GPU"):
        torch.tensor([1], device=GPU)
    with OnTheGpuAlone():
        number + torch.ones(())
        with pytest.raises((DataDependentOutputException, RuntimeError)):
            number.sum().item()
        with pytest.raises((DynamicOutputShapeException, RuntimeError)):
            number.nonzero()
        with pytest.raises(RuntimeError, match="brings a tensor of the host"):
            torch.ones(2).to(GPU)
