"""Law 1: whatever is guessed, in whatever tree, the text is the one `transformers` writes greedily, token by token.

All in float32 on tiny random models. The whole product of drafters, trees, rows, runners and attentions runs on
llama, and a smaller one on every architecture.
"""

import functools

import pytest
import torch

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.decode.loop import Parts, collect
from medusa_cli.decode.rows import Limits
from medusa_cli.drafters.none import NoDrafter
from medusa_cli.model.target import Target
from medusa_cli.trees.files import parse_tree
from medusa_cli.trees.tree import TokenTree
from tests.fakes import DRAFTERS, SHAPES
from tests.real_drafters import REAL
from tests.tiny_models import (
    ARCHITECTURES,
    NUM_NEW,
    SPARE,
    greedy_of,
    known,
    prompt_of,
    quantised_model,
    target_of,
    tiny_model,
)

LIMITS = Limits(NUM_NEW)
# Under a root alone every drafter proposes the same.
DRAFTS = [(drafter, shape) for drafter in DRAFTERS for shape in SHAPES if shape != "empty" or drafter == "wrong"]
ATTENTIONS = [(name, attention) for name, found in ARCHITECTURES.items() for attention in found.attentions]

cached_target = functools.cache(lambda name, attention, runner: target_of(tiny_model(name), attention, runner))


def texts_of(target: Target, name: str, drafter: str, shape: str, num_rows: int) -> list[list[int]]:
    parts = Parts(target, DRAFTERS[drafter](known(name).texts, SHAPES[shape]), Greedy())
    return [each.token_ids for each in collect(parts, known(name).prompts[:num_rows], LIMITS, max_rows=num_rows)]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_tiny_models_write_texts_that_a_fault_would_change(name: str) -> None:
    answers = known(name).answers
    assert max(len(set(answer)) for answer in answers) >= 10, "a text that repeats itself tests nothing"
    assert len(set(answers)) == len(answers)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize(("drafter", "shape"), DRAFTS)
@pytest.mark.parametrize("runner", ["eager", "packed"])
@pytest.mark.parametrize("attention", ["eager", "sdpa", "grouped"])
def test_every_draft_gives_the_greedy_text(
    attention: str, runner: str, drafter: str, shape: str, num_rows: int
) -> None:
    target = cached_target("llama", attention, runner)
    assert texts_of(target, "llama", drafter, shape, num_rows) == known("llama").wanted(num_rows)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize(("drafter", "shape"), DRAFTS)
def test_weights_read_in_blocks_give_the_greedy_text(drafter: str, shape: str, num_rows: int) -> None:
    target = target_of(quantised_model(), runner="blocks")
    prompts = [prompt_of(length) for length in (5, 17, 11)][:num_rows]
    wanted = [greedy_of(quantised_model(), prompt, NUM_NEW + SPARE) for prompt in prompts]
    texts = [prompt + answer for prompt, answer in zip(prompts, wanted, strict=True)]
    parts = Parts(target, DRAFTERS[drafter](texts, SHAPES[shape]), Greedy())
    found = collect(parts, prompts, LIMITS, max_rows=num_rows)
    assert [each.token_ids for each in found] == [answer[:NUM_NEW] for answer in wanted]


@pytest.mark.parametrize(("name", "attention"), ATTENTIONS)
def test_every_architecture_gives_its_greedy_text(name: str, attention: str) -> None:
    target = cached_target(name, attention, "eager")
    assert texts_of(target, name, "random", "wide", 3) == known(name).wanted(3)


@pytest.mark.parametrize(("drafter", "shape", "num_rows"), [("random", "dynamic", 3), ("per_position", "padded", 1)])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_takes_other_trees(name: str, drafter: str, shape: str, num_rows: int) -> None:
    target = cached_target(name, ARCHITECTURES[name].attentions[-1], "packed")
    assert texts_of(target, name, drafter, shape, num_rows) == known(name).wanted(num_rows)


@pytest.mark.parametrize("drafter", REAL)
@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "gpt2"])
def test_guesses_that_are_gathered_or_left_out_by_pace_give_the_greedy_text(name: str, drafter: str) -> None:
    target, texts = cached_target(name, "eager", "packed"), known(name)
    found = collect(Parts(target, REAL[drafter](target, texts.texts), Greedy()), texts.prompts, LIMITS, max_rows=2)
    assert [each.token_ids for each in found] == texts.wanted(3)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text"])
def test_rows_that_join_as_others_leave_change_nothing(name: str) -> None:
    lengths = (5, 17, 11, 3, 1)
    texts = known(name, lengths)
    parts = Parts(cached_target(name, "eager", "eager"), DRAFTERS["random"](texts.texts, SHAPES["wide"]), Greedy())
    found = collect(parts, texts.prompts, LIMITS, max_rows=3)
    assert [each.token_ids for each in found] == texts.wanted(len(lengths))


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3_text", "gpt_oss", "phi3", "starcoder2"])
def test_a_text_far_past_the_window_is_the_greedy_one(name: str) -> None:
    # transformers#47153, #47447, #32357: windows lost, or a crop that fails, once the cache is longer than the window
    prompt = prompt_of(40)
    wanted = greedy_of(tiny_model(name), prompt, 40)
    target = cached_target(name, "eager", "eager")
    for drafter in (DRAFTERS["random"]([prompt + wanted], SHAPES["wide"]), NoDrafter()):
        (found,) = collect(Parts(target, drafter, Greedy()), [prompt], Limits(40))
        assert found.token_ids == wanted


def forty(num_rows: int, rng: torch.Generator) -> TokenTree:
    """Forty nodes under the root."""
    return parse_tree("4x3x2")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_fifty_prompts_under_three_trees_give_the_greedy_texts(attention: str) -> None:
    # transformers#30042, #30413, Medusa#99: another tree, another text
    prompts = [prompt_of(1 + seed % 13, seed) for seed in range(50)]
    wanted = [greedy_of(tiny_model("llama"), prompt, 6) for prompt in prompts]
    texts = [prompt + answer for prompt, answer in zip(prompts, wanted, strict=True)]
    for shape in (SHAPES["chain"], SHAPES["wide"], forty):
        parts = Parts(cached_target("llama", attention, "eager"), DRAFTERS["random"](texts, shape), Greedy())
        found = collect(parts, prompts, Limits(6), max_rows=10)
        assert [each.token_ids for each in found] == wanted, shape.__name__


def test_a_target_writes_a_second_text_as_a_new_one_would() -> None:
    # TensorRT-LLM#2263: state left over from the first prompt
    texts = known("gemma3_text")
    target = cached_target("gemma3_text", "eager", "eager")
    for index in (1, 0, 2, 1):
        parts = Parts(target, DRAFTERS["random"](texts.texts, SHAPES["wide"]), Greedy())
        (found,) = collect(parts, [texts.prompts[index]], LIMITS)
        assert found.token_ids == texts.wanted(3)[index]


@pytest.mark.parametrize("kind", ["static", "quantized", "offloaded"])
def test_a_cache_that_the_generation_config_names_changes_nothing(kind: str) -> None:
    # transformers#45745, #47160: it was asked to crop what can't be
    target = target_of(tiny_model("llama"))
    target.model.generation_config.cache_implementation = kind
    assert texts_of(target, "llama", "random", "wide", 3) == known("llama").wanted(3)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_shows_the_block_drafter_its_layers(name: str) -> None:
    target, texts = cached_target(name, ARCHITECTURES[name].attentions[-1], "packed"), known(name)
    drafter = REAL["block"](target, texts.texts)
    found = collect(Parts(target, drafter, Greedy()), texts.prompts[:2], LIMITS, max_rows=2)
    assert [each.token_ids for each in found] == texts.wanted(2)
    assert sum(each.num_steps for each in found) < 2 * NUM_NEW - 20, "several tokens are kept at once"
