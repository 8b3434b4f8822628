"""Law 1 where the text's length matters: rotary tables that change, texts that are read anew, limits that are scaled.

The measure is `transformers` generate over each prompt alone, by a model that has read nothing before.
"""

import copy
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.decode.loop import Parts, collect, decode
from medusa_cli.decode.rows import Limits
from medusa_cli.drafters.none import NoDrafter
from medusa_cli.errors import TargetError
from medusa_cli.model.runners.select import attach_forward
from medusa_cli.model.target import Target
from tests.fakes import SHAPES, OracleDrafter, RandomDrafter, WrongDrafter
from tests.tiny_models import (
    ARCHITECTURES,
    Architecture,
    final_hidden,
    greedy_of,
    made_of,
    prompt_of,
    target_of,
    tiny_model,
)

SWITCH = 24
NEW = 24
LENGTHS = (5, 17, 40, 23, 24, 25, 22, 5)  # the table changes while written, before, and at the very first tokens
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": SWITCH,
    "long_factor": [1.0, 3.0, 7.0, 15.0],
    "short_factor": [1.0, 1.1, 1.3, 1.6],
}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}

PHIMOE = Architecture("phimoe", {**ARCHITECTURES["phi3"].settings, "num_local_experts": 4, "num_experts_per_tok": 2})
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, longrope": ("llama", {"rope_parameters": {**LONG, "factor": 4.0}}),
    "llama, dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": SWITCH}),
    "phi3, longrope": (
        "phi3",
        {"rope_parameters": LONG, "original_max_position_embeddings": SWITCH, "sliding_window": None},
    ),
    "phimoe, longrope": (
        "phimoe",
        {
            "rope_parameters": {**LONG, "short_mscale": 1.0, "long_mscale": 1.4},
            "original_max_position_embeddings": SWITCH,
        },
    ),
    "gemma3, dynamic beside linear": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": DYNAMIC,
                "sliding_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
            },
            "max_position_embeddings": SWITCH,
        },
    ),
}


@functools.cache
def model_of(name: str) -> Any:
    architecture, changes = MODELS[name]
    # a config writes into its parameters, and dicts can't be remembered by
    return made_of(ARCHITECTURES.get(architecture, PHIMOE), **copy.deepcopy(changes))


@functools.cache
def texts_of(name: str) -> list[list[int]]:
    """Prompts and what the library writes after each; the last begins with tokens that others begin with."""
    prompts = [prompt_of(40)[:length] if index % 2 else prompt_of(length) for index, length in enumerate(LENGTHS)]
    # `dynamic` remembers the longest text: each prompt gets a model of its own
    return [[*prompt, *greedy_of(copy.deepcopy(model_of(name)), prompt, NEW)] for prompt in prompts]


def written(target: Target, name: str, drafter: type, shape: str, num_rows: int) -> list[list[int]]:
    texts = texts_of(name)
    prompts = [text[:length] for text, length in zip(texts, LENGTHS, strict=True)]
    parts = Parts(target, drafter(texts, SHAPES[shape]), Greedy())
    found = collect(parts, prompts, Limits(NEW), max_rows=num_rows)
    return [[*prompt, *each.token_ids] for prompt, each in zip(prompts, found, strict=True)]


@pytest.mark.parametrize(
    ("drafter", "shape", "num_rows"),
    [
        (WrongDrafter, "empty", 3),
        (OracleDrafter, "chain", 1),
        (RandomDrafter, "wide", 3),
        (RandomDrafter, "dynamic", 3),
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_each_row_is_turned_by_the_table_of_its_own_length(name: str, drafter: type, shape: str, num_rows: int) -> None:
    assert written(target_of(model_of(name)), name, drafter, shape, num_rows) == texts_of(name)


def test_keys_of_another_table_are_not_lent() -> None:
    tables = target_of(model_of("llama, longrope")).tables
    assert tables.lendable(prompt=5, length=40, wanted=9) == SWITCH, "its later tokens are of the long table"
    assert tables.lendable(prompt=30, length=40, wanted=50) == 40
    assert tables.lendable(prompt=30, length=40, wanted=9) == 0
    anew = target_of(model_of("phi3, longrope")).tables
    assert anew.turns == [SWITCH]
    assert anew.lendable(prompt=5, length=SWITCH, wanted=9) == SWITCH
    assert anew.lendable(prompt=5, length=40, wanted=9) == 0, "it was read anew"
    assert anew.lendable(prompt=5, length=40, wanted=50) == 40
    growing = target_of(model_of("llama, dynamic")).tables
    assert growing.lendable(prompt=30, length=40, wanted=31) == 0
    assert growing.lendable(prompt=30, length=40, wanted=30) == 30
    plain = target_of(tiny_model("llama")).tables
    assert plain.lendable(prompt=5, length=40, wanted=90) == 40


@pytest.mark.parametrize("name", MODELS)
def test_states_read_from_a_text_are_those_that_wrote_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, texts = target_of(model_of(name)), texts_of(name)[:3]
    prompts = [text[:length] for text, length in zip(texts, LENGTHS, strict=False)]
    parts = Parts(target, OracleDrafter(texts, SHAPES["chain"]), Greedy())
    decided: dict[int, list[Tensor]] = {}
    for gain in decode(parts, prompts, Limits(NEW), max_rows=3):
        decided.setdefault(gain.row.key, []).append(gain.hidden_TH)
    read_BTH = target.hidden(texts, list(map(len, prompts)))
    for key, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        close = torch.cat(decided[key])
        torch.testing.assert_close(read_BTH[key, len(prompt) - 1 : len(text) - 1], close, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_texts_that_are_learnt_from_side_by_side_are_read_as_each_alone(name: str) -> None:
    target, texts = target_of(model_of(name)), [prompt_of(40), prompt_of(9)]
    ids_BT = torch.tensor([texts[0], texts[1] + [0] * 31])
    with torch.no_grad():
        read_BTH = target.read(ids_BT, [40, 9])
    for row, text in enumerate(texts):
        alone_TH = final_hidden(copy.deepcopy(model_of(name)), text)
        torch.testing.assert_close(read_BTH[row, : len(text)], alone_TH, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["phi3, longrope", "llama, dynamic"])
def test_the_cache_of_a_long_text_is_that_of_a_fresh_reading(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDUSA_CHECK", "1")  # raises where it isn't
    texts = texts_of(name)
    # what was written behind a prompt is turned token by token where nothing is read anew
    assert written(target_of(model_of(name)), name, RandomDrafter, "wide", 3) == texts


@pytest.mark.parametrize(("runner", "left"), [("compiled", "blocks"), ("graphs", "eager")])
def test_a_program_that_knows_one_table_is_refused_and_auto_goes_without(runner: str, left: str) -> None:
    target = target_of(model_of("phi3, longrope"), attention="grouped")
    target.identity = replace(target.identity, runner=runner)
    with pytest.raises(TargetError, match="its rotary table changes with the length of each text"):
        attach_forward(target, by_measurement=False)
    attach_forward(target, by_measurement=True)
    assert target.identity.runner == left
    assert not target.forwards


@pytest.mark.parametrize(
    ("parameters", "limit"),
    [
        ({"rope_type": "default"}, 48),
        ({"rope_type": "linear", "factor": 4.0}, 192),
        ({"rope_type": "dynamic", "factor": 4.0}, 192),
        ({"rope_type": "yarn", "factor": 4.0}, 192),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12}, 48),  # scaled already
        ({**LLAMA3, "factor": 4.0, "original_max_position_embeddings": 16}, 64),
        ({**LLAMA3, "factor": 4.0, "original_max_position_embeddings": 12}, 48),
    ],
)
def test_the_context_ends_where_scaled_tables_do(parameters: dict[str, Any], limit: int) -> None:
    said = {"rope_theta": 10000.0, **parameters}
    model = made_of(ARCHITECTURES["llama"], rope_parameters=said, max_position_embeddings=48)
    assert target_of(model).context_limit == limit


def test_tables_of_learnt_positions_end_whatever_a_config_adds() -> None:
    model = made_of(ARCHITECTURES["gpt2"], rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4})
    assert target_of(model).context_limit == 96


def test_a_text_goes_on_past_the_positions_that_were_learnt_where_tables_are_scaled() -> None:
    said = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    model = made_of(ARCHITECTURES["llama"], rope_parameters=said, max_position_embeddings=48)
    target, prompt = target_of(model), prompt_of(40)
    limits = Limits(NEW, context_limit=target.context_limit)
    [found] = collect(Parts(target, NoDrafter(), Greedy()), [prompt], limits)
    assert found.token_ids == greedy_of(model, prompt, NEW)


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_read_in_pieces_is_turned_by_the_table_of_its_whole_length(name: str) -> None:
    target, prompts = target_of(model_of(name)), [prompt_of(40), prompt_of(20)]
    whole, pieces = target.new_cache(2, 40), target.new_cache(2, 40)
    at_once_B1V = target.prefill(prompts, whole).logits_BNV
    target.prefill([prompt[:7] for prompt in prompts], pieces, as_long_as=[40, 20])
    in_pieces_B1V = target.prefill(prompts, pieces).logits_BNV
    torch.testing.assert_close(in_pieces_B1V, at_once_B1V, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("active", "joining"), [(40, 17), (17, 30)])
@pytest.mark.parametrize("name", ["llama, longrope", "llama, dynamic", "phi3, longrope"])
def test_a_row_that_joins_borrows_no_key_of_another_table(name: str, active: int, joining: int) -> None:
    leaving, held = prompt_of(60), prompt_of(40)[:active]
    text = [*held, *greedy_of(copy.deepcopy(model_of(name)), held, NEW)]
    prompts = [leaving, held, text[:joining]]
    # the first is full after four tokens, and the third takes its place beside the second
    parts, limits = Parts(target_of(model_of(name)), NoDrafter(), Greedy()), Limits(NEW, context_limit=64)
    found = [each.token_ids for each in collect(parts, prompts, limits, max_rows=2)]
    assert len(found[0]) == 4
    for prompt, ids in zip(prompts, found, strict=True):
        assert ids == greedy_of(copy.deepcopy(model_of(name)), prompt, len(ids))
