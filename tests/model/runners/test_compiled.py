"""The compiled forward: the same text, one program for all models of a shape, built once, refused in words."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.config.recipe import TargetSettings
from medusa_cli.contracts import Draft
from medusa_cli.decode.loop import Parts, collect
from medusa_cli.decode.rows import Limits
from medusa_cli.errors import TargetError
from medusa_cli.model import attention
from medusa_cli.model.loading.load import make_target
from medusa_cli.model.loading.self_check import self_check
from medusa_cli.model.runners import compiled, export
from medusa_cli.model.target import Target
from medusa_cli.trees.tree import TokenTree
from tests.fakes import DRAFTERS, SHAPES
from tests.real_drafters import REAL
from tests.tiny_models import NUM_NEW, greedy_of, known, prompt_of, target_of, tiny_model

LIMITS = Limits(NUM_NEW)
NAME = "gemma3_text"  # mixed windows, a mapping of masks, scaled embeddings: what a graph could lose

compiled_target = functools.cache(lambda: target_of(tiny_model(NAME), "grouped", "compiled"))


def texts_of(target: Target, drafter: str, shape: str, num_rows: int) -> list[list[int]]:
    parts = Parts(target, DRAFTERS[drafter](known(NAME).texts, SHAPES[shape]), Greedy())
    return [each.token_ids for each in collect(parts, known(NAME).prompts[:num_rows], LIMITS, max_rows=num_rows)]


def other_weights(model: nn.Module) -> nn.Module:
    """A model of the same shape with other numbers."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.numel() > export.SMALL:
                parameter.mul_(1.25)
    return other


@pytest.mark.parametrize(
    ("drafter", "shape", "num_rows"),
    [("wrong", "empty", 1), ("oracle", "chain", 1), ("random", "dynamic", 3), ("random", "wide", 3)],
)
def test_the_compiled_forward_writes_the_greedy_text(drafter: str, shape: str, num_rows: int) -> None:
    target = compiled_target()
    assert target.identity.runner == "compiled"
    assert texts_of(target, drafter, shape, num_rows) == known(NAME).wanted(num_rows)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("drafter", REAL)
def test_every_drafter_of_ours_writes_the_greedy_text_on_it(drafter: str, num_rows: int) -> None:
    target, texts = compiled_target(), known(NAME)
    parts = Parts(target, REAL[drafter](target, texts.texts), Greedy())
    found = collect(parts, texts.prompts, LIMITS, max_rows=num_rows)
    assert [each.token_ids for each in found] == texts.wanted(3)


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_tokens_that_lie_apart_in_memory_are_read_as_they_are_meant(num_nodes: int) -> None:
    target = compiled_target()
    drafts = torch.randint(0, 97, (3, num_nodes, 4))
    tree = TokenTree.chain(num_nodes - 1)

    def logits(tokens_BN: torch.Tensor) -> torch.Tensor:
        cache = target.new_cache(3, 0)
        target.prefill([prompt_of(length) for length in (5, 9, 7)], cache)
        return target.verify(Draft(tokens_BN, tree), cache).logits_BNV

    apart = drafts[:, :, 0]
    assert num_nodes == 1 or not apart.is_contiguous()
    assert torch.equal(logits(apart), logits(apart.contiguous().clone()))


def test_the_self_check_scores_its_tree_with_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    target = compiled_target()
    (forward,) = target.forwards
    program = forward.program
    monkeypatch.setattr(forward, "program", lambda *given: calls.append(given) or program(*given))
    result = self_check(target)
    assert result.ok, result
    assert calls


def test_other_weights_of_the_same_shape_need_no_second_program(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_target()
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", None)
    model = other_weights(tiny_model(NAME))
    target = target_of(model, "grouped", "compiled")
    parts = Parts(target, DRAFTERS["random"](known(NAME).texts, SHAPES["wide"]), Greedy())
    (found,) = collect(parts, [prompt_of(11)], LIMITS, max_rows=1)
    assert found.token_ids == greedy_of(model, prompt_of(11), NUM_NEW)


def test_auto_takes_the_program_that_an_earlier_run_built() -> None:
    compiled_target()
    assert target_of(tiny_model(NAME), "grouped", "auto").identity.runner == "compiled"
    assert target_of(tiny_model("llama", num_hidden_layers=1), "grouped", "auto").identity.runner != "compiled"


def test_a_model_whose_attention_has_no_kernel_is_refused_in_words() -> None:
    with pytest.raises(TargetError, match="compiled runner can't run") as caught:
        target_of(tiny_model("llama"), "eager", "compiled")
    assert "--runner auto" in caught.value.hint


class Wilful(LlamaForCausalLM):
    """Reads its own numbers to decide what to do, which no graph can follow."""

    @functools.wraps(LlamaForCausalLM.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        return out if out.logits.sum() > 0 else super().forward(*args, **kwargs)


def test_a_model_that_is_no_graph_is_refused_in_words() -> None:
    config = copy.deepcopy(tiny_model("llama").config)
    config._attn_implementation = attention.register()
    settings = TargetSettings(model="tiny", dtype="float32", device="cpu", runner="compiled")
    with pytest.raises(TargetError, match="Wilful can't be turned into a graph"):
        make_target(Wilful(config).eval(), None, settings)


def test_small_tensors_are_a_part_of_what_a_program_is_for() -> None:
    model = tiny_model(NAME)
    small = export.small_tensors(model)
    assert small, "the embeddings' scale is one number"
    other = copy.deepcopy(model)
    name = next(iter(small))
    with torch.no_grad():
        dict([*other.named_parameters(), *other.named_buffers()])[name].add_(1.0)
    assert compiled.folder_of(other) != compiled.folder_of(model)
