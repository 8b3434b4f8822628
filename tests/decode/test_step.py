"""A step with real heads: any guesses leave the text as it is, seeds, and one read of the host. On a tiny llama."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.acceptance.lossless import Lossless
from medusa_cli.acceptance.typical import Typical
from medusa_cli.contracts import AcceptanceRule
from medusa_cli.decode.loop import Parts, collect, decode
from medusa_cli.decode.rows import Limits
from medusa_cli.drafters.medusa import MedusaDrafter
from medusa_cli.trees.dynamic import DynamicShape
from medusa_cli.trees.tree import TokenTree
from tests.decode.tiny_llama import HEADS_TREE, TARGET, TEXTS, oracle, random_heads
from tests.tiny_models import NUM_NEW, VOCAB, prompt_of


@pytest.mark.parametrize("draft_ids", [range(VOCAB), range(0, VOCAB, 3)])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_heads_of_any_quality_leave_the_text_as_it_is(num_rows: int, draft_ids: Sequence[int]) -> None:
    parts = Parts(TARGET(), MedusaDrafter(random_heads(list(draft_ids)), HEADS_TREE), Greedy())
    found = collect(parts, TEXTS().prompts, Limits(NUM_NEW), num_rows)
    assert [each.token_ids for each in found] == TEXTS().wanted(3)


@pytest.mark.parametrize("floor", [0.0, 0.002])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_trees_that_change_with_every_row_and_step_leave_the_text_as_it_is(num_rows: int, floor: float) -> None:
    parts = Parts(TARGET(), MedusaDrafter(random_heads(list(range(VOCAB))), DynamicShape(9, floor)), Greedy())
    found = collect(parts, TEXTS().prompts, Limits(NUM_NEW), num_rows)
    assert [each.token_ids for each in found] == TEXTS().wanted(3)


def test_the_same_seed_and_tree_write_the_same() -> None:
    # vllm#16077
    def sampled(seed: int) -> list[list[int]]:
        parts = Parts(TARGET(), oracle(), Lossless(temperature=2.0, top_p=0.95, top_k=0), seed=seed)
        return [each.token_ids for each in collect(parts, TEXTS().prompts, Limits(12), max_rows=3)]

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


@pytest.mark.parametrize("rule", [Lossless(1.2, 0.9, 0), Lossless(0.9, 1.0, 20), Typical(0.9)])
def test_sampled_rows_side_by_side_write_what_each_writes_alone(rule: AcceptanceRule) -> None:
    prompts = [prompt_of(length, seed) for seed, length in enumerate((5, 17, 5, 11, 1, 8))]
    limits = Limits(NUM_NEW, frozenset(range(0, VOCAB, 9)))  # texts end at different steps, so that rows join others
    drafter = MedusaDrafter(random_heads(list(range(VOCAB))), TokenTree.from_paths([[0], [1], [0, 0], [0, 1]]))
    alone = []
    for key, prompt in enumerate(prompts):
        nothing_before = [[0]] * key  # a text's stream goes by its place in the run
        alone.append(collect(Parts(TARGET(), drafter, rule, seed=3), [*nothing_before, prompt], limits)[key])
    assert collect(Parts(TARGET(), drafter, rule, seed=3), prompts, limits, max_rows=3) == alone
    assert len({text.num_steps for text in alone}) > 1


class HostReads(TorchDispatchMode):
    """Counts what would make the host wait for a device: reads of values, and results whose size depends on values."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.found: list[str] = []
        for name in ("tolist", "cpu", "numpy"):
            monkeypatch.setattr(torch.Tensor, name, self._counting(name, getattr(torch.Tensor, name)))

    def _counting(self, name: str, method: Any) -> Any:
        def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.found.append(name)
            return method(tensor, *args, **kwargs)

        return counting

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += [name for name in self.WAITS if func.overloadpacket.__name__.startswith(name)]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_step_waits_for_the_device_once(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(TARGET(), MedusaDrafter(random_heads(list(range(VOCAB))), HEADS_TREE), Greedy())
    stream = decode(parts, TEXTS().prompts[:num_rows], Limits(NUM_NEW), max_rows=num_rows)
    # prefill, and one step in which the tree learns its depth
    for _ in range(2 * num_rows):
        next(stream)
    with HostReads(monkeypatch) as reads:
        next(stream)
    # the first is a view: of logits that lie on the host already, and on a device there is none (kernels/argmax.py)
    assert reads.found == ["numpy", "tolist"]
