"""Where texts end: at stops, at their budget, at the context's last position. On a tiny llama."""

import functools
import math
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.decode.loop import Generation, Parts, collect
from medusa_cli.decode.rows import Limits
from medusa_cli.decode.stop_strings import StopStrings
from medusa_cli.decode.text import decode_text
from medusa_cli.drafters.mixed import Budget, GatheredDrafter
from medusa_cli.drafters.none import NoDrafter
from medusa_cli.drafters.suffix import Suffixes
from medusa_cli.errors import DataError
from medusa_cli.model.target import Target
from tests.decode.tiny_llama import DEPTH, TARGET, TEXTS, Counter, deep, oracle, up_to
from tests.fakes import KnowingDrafter, OracleDrafter, RandomDrafter
from tests.real_drafters import KnownGuesses
from tests.tiny_models import NUM_NEW, VOCAB, greedy_of, prompt_of, target_of, tiny_model


@pytest.mark.parametrize("offset", range(2 * DEPTH + 3))
def test_a_stop_id_ends_the_text_at_every_place_of_a_step(offset: int, counter: Counter) -> None:
    # transformers#47912, #48981, #28508: tokens after the end, or one more forward; the root and the bonus token too
    answer = TEXTS().answers[0]
    stops = frozenset({answer[offset]})
    wanted = up_to(answer, stops)
    (found,) = collect(Parts(TARGET(), oracle(), Greedy()), TEXTS().prompts[:1], Limits(NUM_NEW, stops))
    assert found.token_ids == wanted
    assert found.finish_reason == "stop"
    assert found.num_steps == counter.num_verified == math.ceil((len(wanted) - 1) / (DEPTH + 1))
    assert sum(found.kept) == len(wanted) - 1
    if counter.lengths:
        assert counter.lengths[-1] == [len(TEXTS().prompts[0]) + len(wanted) - 1], (
            "the cache holds tokens past the stop"
        )


def test_a_root_that_is_a_stop_id_asks_for_no_forward(counter: Counter) -> None:
    stops = frozenset({TEXTS().answers[0][0]})
    (found,) = collect(Parts(TARGET(), oracle(), Greedy()), TEXTS().prompts[:1], Limits(NUM_NEW, stops))
    assert found == Generation([*stops], "stop", [], [])
    assert (counter.prefilled, counter.num_verified) == ([1], 0)


@pytest.mark.parametrize("drafter", [OracleDrafter, RandomDrafter])
def test_whichever_stop_id_comes_first_ends_each_row(drafter: type[KnowingDrafter]) -> None:
    # vllm#4180, transformers#31362: the second id of a generation config was never looked at
    model = tiny_model("llama")
    target = target_of(model)
    target.model.generation_config.eos_token_id = [TEXTS().answers[0][9], TEXTS().answers[1][7]]
    target = target_of(target.model)
    assert len(target.stop_ids) == 2
    limits = Limits(NUM_NEW, target.stop_ids)
    found = collect(Parts(target, drafter(TEXTS().texts, deep), Greedy()), TEXTS().prompts, limits, max_rows=3)
    assert [each.token_ids for each in found] == [up_to(answer, target.stop_ids) for answer in TEXTS().wanted(3)]


@pytest.mark.parametrize("num_new", range(1, 9))
def test_a_text_never_has_more_tokens_than_asked_for(num_new: int, counter: Counter) -> None:
    # transformers#46993, #47195
    found = collect(Parts(TARGET(), oracle(), Greedy()), TEXTS().prompts, Limits(num_new), max_rows=3)
    assert [each.token_ids for each in found] == TEXTS().wanted(3, num_new)
    assert {each.finish_reason for each in found} == {"length"}
    assert counter.num_verified == math.ceil((num_new - 1) / (DEPTH + 1))


@functools.cache
def letters() -> PreTrainedTokenizerFast:
    """Ids as a letter and a digit: a0, a1, ... j6."""
    inner = Tokenizer(models.WordLevel({f"{chr(97 + index // 10)}{index % 10}": index for index in range(VOCAB)}, "a0"))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.mark.parametrize("drafter", [OracleDrafter, RandomDrafter])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("start", range(2, 2 * DEPTH + 4))
def test_a_stop_string_ends_the_text_wherever_tokens_and_steps_are_cut(
    start: int, size: int, drafter: type[KnowingDrafter]
) -> None:
    # transformers#48039, vllm#47616: text went on, or ids did
    answer = TEXTS().wanted(1)[0]
    text = decode_text(letters(), answer)
    stop = text[start : start + size]
    limits = Limits(NUM_NEW, new_finder=StopStrings([stop], letters()).finder)
    (found,) = collect(Parts(TARGET(), drafter(TEXTS().texts, deep), Greedy()), TEXTS().prompts[:1], limits)
    # a token has two characters: the text ends with the token in which the stop string's last one is
    end = text.index(stop) + size
    assert found.token_ids == answer[: math.ceil(end / 2)]
    assert found.finish_reason == "stop"


# --- the context's end ---


@functools.cache
def short_target(name: str) -> Target:
    return target_of(short_model(name))


def short_model(name: str) -> Any:
    """A model with 32 positions."""
    return tiny_model(name, **{"n_positions" if name == "gpt2" else "max_position_embeddings": 32})


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama"])
@pytest.mark.parametrize("space", [1, 3, 7])
def test_a_text_ends_at_the_context_s_last_position(name: str, space: int) -> None:
    # vllm#16087, #57941, #58080: a position out of the table, or a crash
    target, prompts = short_target(name), [prompt_of(32 - space), prompt_of(9)]
    assert target.context_limit == 32
    wanted = [greedy_of(short_model(name), prompt, 32 - len(prompt)) for prompt in prompts]
    texts = [prompt + answer for prompt, answer in zip(prompts, wanted, strict=True)]
    known = GatheredDrafter([KnownGuesses(texts, DEPTH, (DEPTH,))], Budget(2 * DEPTH))
    copying = GatheredDrafter([Suffixes()], Budget(16))
    for drafter, depth in ((OracleDrafter(texts, deep), DEPTH), (known, DEPTH), (copying, None), (NoDrafter(), 0)):
        limits = Limits(40, context_limit=target.context_limit)
        found = collect(Parts(target, drafter, Greedy()), prompts, limits, max_rows=2)
        assert [each.token_ids for each in found] == wanted
        assert {each.finish_reason for each in found} == {"length"}
        if depth is not None:  # guesses are kept up to the end
            assert [each.num_steps for each in found] == [math.ceil((len(text) - 1) / (depth + 1)) for text in wanted]


@pytest.mark.parametrize("length", [32, 33, 50])
def test_a_prompt_that_fills_the_context_is_refused_before_any_forward(length: int, counter: Counter) -> None:
    # sglang#3574, EAGLE#75
    limits = Limits(5, context_limit=32)
    with pytest.raises(DataError, match=f"the prompt has {length} tokens; the model's context holds 32"):
        collect(Parts(TARGET(), NoDrafter(), Greedy()), [prompt_of(5), prompt_of(length)], limits, max_rows=2)
    assert (counter.prefilled, counter.num_verified) == ([], 0)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(DataError, match="the prompt is empty"):
        collect(Parts(TARGET(), NoDrafter(), Greedy()), [[]], Limits(5))
