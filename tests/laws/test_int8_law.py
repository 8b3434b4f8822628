"""Law of int8: a text's numbers are plain decoding's to the last bit, in any tree, any batch, any cut of a prompt.

Nothing is a near tie: products are sums of integers, and all else sums a row's numbers in one order.
"""

import functools

import pytest
import torch
from torch import Tensor

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.contracts import Draft
from medusa_cli.decode.loop import Parts, collect
from medusa_cli.decode.rows import Limits
from medusa_cli.drafters.none import NoDrafter
from medusa_cli.errors import TargetError
from medusa_cli.kernels.attend import can_attend
from medusa_cli.model.prefill import Piece
from medusa_cli.model.target import Target
from medusa_cli.trees.tree import TokenTree
from tests.fakes import DRAFTERS, SHAPES, WIDE_PATHS
from tests.tiny_models import ARCHITECTURES, NUM_NEW, SPARE, prompt_of, quantised_model, target_of, tiny_model

pytestmark = pytest.mark.skipif(not can_attend(), reason="no C++ compiler")

MODELS = [name for name, found in ARCHITECTURES.items() if "grouped" in found.attentions]
LENGTHS = (5, 17, 40, 11, 3, 26, 9, 1)


@functools.cache
def target(name: str, runner: str = "blocks") -> Target | None:
    """The tiny model in int8, None where it is refused."""
    model = quantised_model() if name == "quantised" else tiny_model(name)
    try:
        return target_of(model, "grouped", runner, dtype="int8")
    except TargetError:
        return None


def taken(name: str, runner: str = "blocks") -> Target:
    found = target(name, runner)
    if found is None:
        pytest.skip(f"{name} is refused")
    return found


def one_by_one(target: Target, prompt: list[int], path: list[int]) -> Tensor:
    """Logits [path, V] after each token of the path, read as plain decoding reads them."""
    cache, shown = target.new_cache(1, 0), []
    target.prefill([prompt], cache)
    for token in path:
        shown.append(target.verify(Draft(torch.tensor([[token]]), TokenTree.empty()), cache).logits_BNV[0, 0])
        cache.commit(slice(0, 1), [1])
    return torch.stack(shown)


@torch.inference_mode()
def assert_a_tree_shows_what_its_paths_do(target: Target, lengths: tuple[int, ...]) -> None:
    tree, rng = TokenTree.from_paths(WIDE_PATHS), torch.Generator().manual_seed(3)
    prompts = [prompt_of(length) for length in lengths]
    tokens_BN = torch.randint(0, 97, (len(prompts), tree.num_nodes), generator=rng)
    cache = target.new_cache(len(prompts), 0)
    target.prefill(prompts, cache)
    seen = target.verify(Draft(tokens_BN, tree), cache).logits_BNV
    for row, prompt in enumerate(prompts):
        for leaf in (tree.num_nodes - 1, tree.num_nodes - 3, 4):
            path = tree.ancestors_XNN[0, leaf].nonzero().flatten()
            alone = one_by_one(target, prompt, tokens_BN[row, path].tolist())
            assert torch.equal(seen[row, path], alone), (row, leaf)


@pytest.mark.parametrize("name", [*MODELS, "quantised"])
def test_a_node_s_logits_are_those_of_its_path_read_one_by_one(name: str) -> None:
    assert_a_tree_shows_what_its_paths_do(taken(name), LENGTHS[:1])
    assert_a_tree_shows_what_its_paths_do(taken(name), LENGTHS)


@pytest.mark.parametrize("name", ["llama", "quantised"])
def test_so_are_those_of_the_compiled_program(name: str) -> None:
    assert_a_tree_shows_what_its_paths_do(taken(name, "compiled"), LENGTHS[:1])
    assert_a_tree_shows_what_its_paths_do(taken(name, "compiled"), LENGTHS)


@torch.inference_mode()
@pytest.mark.parametrize("name", [*MODELS, "quantised"])
def test_a_prompt_may_be_cut_anywhere_and_read_beside_others(name: str) -> None:
    target, prompt = taken(name), prompt_of(90)
    whole = target.new_cache(1, 0)
    wanted = target.prefill([prompt], whole)
    for cuts in ([1], [64], [7, 8, 50], [89], [30, 60]):
        cache, shown = target.new_cache(1, 0), None
        for start, end in zip([0, *cuts], [*cuts, 90], strict=True):
            shown = target.read_piece(Piece(0, [prompt[start:end]], [90], is_last=end == 90), cache)
        assert shown is not None
        assert torch.equal(shown.logits_BNV, wanted.logits_BNV), cuts
        assert torch.equal(shown.hidden_BNH, wanted.hidden_BNH), cuts
    beside = target.new_cache(3, 0)
    shown = target.prefill([prompt_of(31), prompt, prompt_of(120)], beside)
    assert torch.equal(shown.logits_BNV[1], wanted.logits_BNV[0])


@functools.cache
def plain(name: str, runner: str) -> list[list[int]]:
    """What each prompt's text is, written alone without a guess."""
    parts = Parts(taken(name, runner), NoDrafter(), Greedy())
    prompts = [prompt_of(length) for length in LENGTHS]
    return [collect(parts, [prompt], Limits(NUM_NEW + SPARE), max_rows=1)[0].token_ids for prompt in prompts]


@pytest.mark.parametrize("num_rows", [1, 3, 8])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "empty"])
@pytest.mark.parametrize("drafter", ["random", "per_position"])
@pytest.mark.parametrize("runner", ["blocks", "compiled"])
def test_whatever_is_guessed_texts_are_the_plain_loop_s(runner: str, drafter: str, shape: str, num_rows: int) -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    wanted = plain("quantised", runner)
    texts = [prompt + text for prompt, text in zip(prompts, wanted, strict=True)]
    parts = Parts(taken("quantised", runner), DRAFTERS[drafter](texts, SHAPES[shape]), Greedy())
    found = collect(parts, prompts, Limits(NUM_NEW), max_rows=num_rows)
    assert [each.token_ids for each in found] == [text[:NUM_NEW] for text in wanted]


def test_models_that_multiply_elsewhere_are_refused_by_name() -> None:
    refused = [name for name in MODELS if target(name) is None]
    assert refused, "a mixture of experts keeps its weights outside of linear layers"
    with pytest.raises(TargetError, match="int8 can't run"):
        target_of(tiny_model(refused[0]), "grouped", "blocks", dtype="int8")
