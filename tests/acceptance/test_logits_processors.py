"""Logits are shaped at every node as `transformers` generate shapes them for the text that ends there."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.acceptance.logits_processors import asked_of, left_out_of, shaping_of, stop_strings_of
from medusa_cli.contracts import Draft
from medusa_cli.decode.loop import Parts, collect
from medusa_cli.decode.rows import Limits, Row
from medusa_cli.drafters.none import NoDrafter
from medusa_cli.errors import RecipeError
from medusa_cli.trees.tree import TokenTree
from tests.fakes import DRAFTERS, SHAPES
from tests.tiny_models import VOCAB, prompt_of, target_of, tiny_model

CPU = torch.device("cpu")
NUM_NEW = 14
STOPS = frozenset({75, 11})
PROMPTS = [prompt_of(5), prompt_of(17), prompt_of(11)]

GREEDY_SETTINGS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.8, "no_repeat_ngram_size": 2},
    {"encoder_repetition_penalty": 1.7},
    {"encoder_no_repeat_ngram_size": 2},
    {"bad_words_ids": [[16], [72, 56], [95, 59, 15]]},
    {"sequence_bias": [[[4], 2.5], [[8, 9], -4.0]]},
    {"min_new_tokens": 9},
    {"min_length": 18},
    {"min_length": 40, "min_new_tokens": 7},
    {"forced_eos_token_id": 11},
    {"exponential_decay_length_penalty": (4, 1.5)},
    {"suppress_tokens": [*range(0, VOCAB, 3)]},
    {"begin_suppress_tokens": [*range(0, VOCAB, 2)]},
    {"remove_invalid_values": True, "renormalize_logits": True, "repetition_penalty": 1.2},
]
SAMPLING_SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.7, "min_p": 0.05},
    {"temperature": 1.3, "top_k": 9, "top_p": 0.8, "typical_p": 0.9},
    {"epsilon_cutoff": 0.01, "repetition_penalty": 1.3},
    {"eta_cutoff": 0.02, "top_k": 30},
    {"top_h": 0.4},
]


def config_of(settings: dict[str, Any], **more: Any) -> GenerationConfig:
    stops = sorted(STOPS)
    return GenerationConfig(max_new_tokens=NUM_NEW, eos_token_id=stops, pad_token_id=0, **settings, **more)


def generated(prompt: list[int], config: GenerationConfig) -> tuple[list[int], list[Tensor]]:
    """The library's text, and the scores that decided each of its tokens."""
    ids = torch.tensor([prompt])
    out = tiny_model("llama").generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=config,
        output_scores=True,
        return_dict_in_generate=True,
    )
    return out.sequences[0, len(prompt) :].tolist(), [score_1V[0] for score_1V in out.scores]


@pytest.mark.parametrize("shape", ["wide", "dynamic"])
@pytest.mark.parametrize("settings", GREEDY_SETTINGS, ids=lambda settings: "+".join(settings))
def test_a_shaped_greedy_text_is_the_library_s(settings: dict[str, Any], shape: str) -> None:
    config = config_of(settings)
    wanted = [generated(prompt, config)[0] for prompt in PROMPTS]
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, wanted, strict=True)]
    shaping = shaping_of(asked_of(config, sampling=False), STOPS, CPU)
    parts = Parts(target_of(tiny_model("llama")), DRAFTERS["random"](texts, SHAPES[shape]), Greedy(), shaping=shaping)
    found = collect(parts, PROMPTS, Limits(NUM_NEW, STOPS), max_rows=3)
    assert [each.token_ids for each in found] == wanted


@pytest.mark.parametrize("settings", GREEDY_SETTINGS, ids=lambda settings: "+".join(settings))
def test_each_of_these_settings_changes_a_text(settings: dict[str, Any]) -> None:
    plain = [generated(prompt, config_of({}))[0] for prompt in PROMPTS]
    assert plain != [generated(prompt, config_of(settings))[0] for prompt in PROMPTS]


@pytest.mark.parametrize("settings", [*SAMPLING_SETTINGS, *GREEDY_SETTINGS], ids=lambda settings: "+".join(settings))
def test_every_node_is_shaped_as_the_library_shapes_the_text_that_ends_there(settings: dict[str, Any]) -> None:
    config = config_of({"top_k": 0, **settings}, do_sample=True)  # the library's own default is the 50 best
    prompt = PROMPTS[1]
    torch.manual_seed(3)
    text, scores = generated(prompt, config)
    shaping = shaping_of(asked_of(config, sampling=True), STOPS, CPU)
    logits_TV = tiny_model("llama")(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1]
    row = Row(0, prompt + text[:1], len(prompt), Limits(NUM_NEW, STOPS))
    # a chain of what was drawn, with a wrong guess beside each of its nodes
    paths = [path for depth in range(1, len(text)) for path in ([0] * depth, [0] * (depth - 1) + [1])]
    tree = TokenTree.from_paths(paths)
    chain = [node for node, path in enumerate([(), *tree.paths()]) if not any(path)]
    tokens_1N = torch.full((1, tree.num_nodes), 1)
    tokens_1N[0, chain] = torch.tensor(text)
    logits_1NV = torch.randn(1, tree.num_nodes, VOCAB)
    logits_1NV[0, chain[: len(text) - 1]] = logits_TV[1:]
    shaped_1NV = shaping.nodes(logits_1NV, Draft(tokens_1N, tree), [row])
    for place, node in enumerate(chain[: len(text) - 1]):
        torch.testing.assert_close(shaped_1NV[0, node], scores[place + 1], atol=1e-4, rtol=1e-4)
    first = Row(0, prompt, len(prompt), Limits(NUM_NEW, STOPS))
    torch.testing.assert_close(shaping.first(logits_TV[:1], [first])[0], scores[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("least", [0, 2])
def test_min_new_tokens_overrules_min_length_as_in_the_library(least: int) -> None:
    config = config_of({"min_length": 40, "min_new_tokens": least})
    wanted = [generated(prompt, config)[0] for prompt in PROMPTS]
    assert wanted != [generated(prompt, config_of({"min_length": 40}))[0] for prompt in PROMPTS]
    shaping = shaping_of(asked_of(config, sampling=False), STOPS, CPU)
    parts = Parts(target_of(tiny_model("llama")), NoDrafter(), Greedy(), shaping=shaping)
    assert [each.token_ids for each in collect(parts, PROMPTS, Limits(NUM_NEW, STOPS))] == wanted


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, {}),
        ({"num_beams": 1, "penalty_alpha": 0.0, "stop_strings": ["x"], "num_return_sequences": 1}, {}),
        ({"num_beams": 4, "max_time": 2.5}, {"num_beams": 4, "max_time": 2.5}),
        ({"dola_layers": "high", "penalty_alpha": 0.6}, {"penalty_alpha": 0.6, "dola_layers": "high"}),
    ],
)
def test_what_no_command_does_is_there_to_be_named(settings: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert left_out_of(GenerationConfig(**settings)) == wanted


def test_stop_strings_are_one_or_several_texts() -> None:
    assert stop_strings_of(GenerationConfig()) == ()
    assert stop_strings_of(GenerationConfig(stop_strings="END")) == ("END",)
    assert stop_strings_of(GenerationConfig(stop_strings=["END", "\n"])) == ("END", "\n")
    for wrong in (["END", 3], [""]):
        with pytest.raises(RecipeError, match="stop_strings"):
            stop_strings_of(GenerationConfig(stop_strings=wrong))


def test_nothing_asked_is_nothing_done() -> None:
    assert asked_of(GenerationConfig(), sampling=True) == {}
    assert asked_of(GenerationConfig(repetition_penalty=1.0, top_k=0, top_p=1.0), sampling=True) == {}
    assert shaping_of({}, STOPS, CPU) is None
    assert shaping_of({"min_new_tokens": 4}, frozenset(), CPU) is None, "a text without an end can't end early"


def test_settings_of_sampling_are_not_asked_of_greedy_decoding() -> None:
    config = GenerationConfig(temperature=0.6, top_p=0.9, min_p=0.1, repetition_penalty=1.1)
    assert asked_of(config, sampling=False) == {"repetition_penalty": 1.1}
    assert [*asked_of(config, sampling=True)] == ["repetition_penalty", "temperature", "top_p", "min_p"]


@pytest.mark.parametrize("settings", [{"guidance_scale": 1.5}, {"watermarking_config": {"bias": 2.0}}])
def test_what_can_not_be_followed_in_a_tree_is_refused_by_name(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(RecipeError, match=f"asks for {name}, which can't be followed in a tree"):
        asked_of(GenerationConfig(**settings), sampling=False)


@pytest.mark.parametrize(
    "settings", [{"repetition_penalty": -1.0}, {"no_repeat_ngram_size": -3}, {"bad_words_ids": [[-4]]}, {"min_p": 7.0}]
)
def test_impossible_values_are_told_before_anything_is_decoded(settings: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="an impossible setting of generation: "):
        shaping_of(settings, STOPS, CPU)
