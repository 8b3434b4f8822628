"""Logits that are not finite: named when they decide a token, and no matter where they decide none. On a tiny llama."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.acceptance.logits_processors import shaping_of
from medusa_cli.acceptance.lossless import Lossless
from medusa_cli.acceptance.typical import Typical
from medusa_cli.config.recipe import TargetSettings
from medusa_cli.contracts import AcceptanceRule, Context, Drafter
from medusa_cli.decode.loop import Parts, collect, decode
from medusa_cli.decode.rows import Limits
from medusa_cli.drafters.none import NoDrafter
from medusa_cli.errors import TargetError
from medusa_cli.kernels.argmax import have_best
from medusa_cli.model.loading.load import make_target
from medusa_cli.model.target import Target
from tests.decode.tiny_llama import TEXTS, deep, oracle
from tests.fakes import WrongDrafter
from tests.tiny_models import NUM_NEW, VOCAB, target_of, tiny_model

NAN, INF = float("nan"), float("inf")


def spoilt(embedding: int | None = None, output: int | None = None, number: float = NAN, **wrapped: Any) -> Target:
    """The tiny llama with a row of this number in its embeddings or in its output matrix."""
    model = copy.deepcopy(tiny_model("llama"))
    with torch.no_grad():
        if embedding is not None:
            model.model.embed_tokens.weight[embedding] = number
        if output is not None:
            model.lm_head.weight[output] = number
    return target_of(model, **wrapped)


def unwritten() -> int:
    """A token that stands in none of the texts."""
    return next(token for token in range(1, VOCAB) if all(token not in text for text in TEXTS().texts))


class Tempting(WrongDrafter):
    """Guesses one token at every node."""

    def __init__(self, token: int) -> None:
        super().__init__(TEXTS().texts, deep)
        self.token = token

    def propose(self, context: Any) -> Any:
        draft = super().propose(context)
        draft.tokens_BN[:, 1:] = self.token
        return draft


@pytest.mark.parametrize(
    ("logits", "wanted"),
    [
        ([1.0, -INF, 3.0], True),
        ([1.0, NAN, 3.0], False),
        ([1.0, INF, 3.0], False),
        ([-INF, -INF, -INF], False),
        ([INF, -INF, NAN], False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_some_tokens_may_be_impossible_and_no_number_may_be_none(
    logits: list[float], wanted: bool, dtype: torch.dtype
) -> None:
    assert have_best(torch.tensor([[logits]], dtype=dtype)).tolist() == [[wanted]]


@pytest.mark.parametrize("make", [NoDrafter, oracle])
@pytest.mark.parametrize("number", [NAN, INF])
def test_a_prompt_with_a_broken_embedding_is_named_with_layer_and_place(make: Any, number: float) -> None:
    prompt = [3, 5, 7, 9]
    with pytest.raises(TargetError) as failed:
        collect(Parts(spoilt(embedding=7, number=number), make(), Greedy()), [[1, 2], prompt], Limits(8), max_rows=2)
    assert "not finite in float32: text 2, after 4 tokens" in failed.value.message
    assert "model.embed_tokens is the first to give such numbers, at token 2 (id 7)" in failed.value.message
    assert "weights are damaged" in failed.value.hint


@pytest.mark.parametrize("runner", ["eager", "packed"])
def test_a_broken_row_of_the_output_matrix_is_named(runner: str) -> None:
    with pytest.raises(TargetError, match="text 1, after 4 tokens; lm_head is the first to give such numbers"):
        collect(Parts(spoilt(output=7, number=INF, runner=runner), NoDrafter(), Greedy()), [[3, 5, 8, 9]], Limits(8))


RULES = [Greedy(), Lossless(0.8, 0.9, 0), Lossless(0.8, 1.0, 0), Lossless(0.8, 0.5, 3), Typical(0.7)]


@pytest.mark.parametrize("rule", RULES)
def test_whatever_chooses_tokens_none_is_chosen_among_broken_numbers(rule: AcceptanceRule) -> None:
    with pytest.raises(TargetError, match="not finite"):
        collect(Parts(spoilt(embedding=7), NoDrafter(), rule), [[3, 5, 7, 9]], Limits(8))


def until_it_fails(target: Target, drafter: Drafter, rule: AcceptanceRule) -> tuple[list[int], str]:
    """The first text as far as it is written, and the error that ends it."""
    written: list[int] = []

    def write() -> None:
        for gain in decode(Parts(target, drafter, rule), [TEXTS().prompts[0]], Limits(NUM_NEW)):
            written.extend(gain.tokens)

    with pytest.raises(TargetError) as failed:
        write()
    return written, failed.value.message


@pytest.mark.parametrize("rule", [Greedy(), Lossless(0.01, 1.0, 0)])
def test_guesses_reach_as_far_as_plain_decoding_does(rule: AcceptanceRule) -> None:
    answer = TEXTS().answers[0]
    place = next(place for place in range(4, NUM_NEW) if answer[place] not in (*TEXTS().prompts[0], *answer[:place]))
    broken = spoilt(embedding=answer[place])
    plain = until_it_fails(broken, NoDrafter(), rule)
    assert plain[0] == list(answer[: place + 1])
    assert until_it_fails(broken, oracle(), rule) == plain


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize(
    "wrapped", [{}, {"attention": "sdpa"}, {"attention": "grouped"}, {"attention": "grouped", "runner": "packed"}]
)
def test_a_guess_that_breaks_and_is_not_kept_changes_no_text(num_rows: int, wrapped: dict[str, str]) -> None:
    token = unwritten()
    parts = Parts(spoilt(embedding=token, **wrapped), Tempting(token), Greedy())
    found = collect(parts, TEXTS().prompts, Limits(NUM_NEW), num_rows)
    assert [text.token_ids for text in found] == TEXTS().wanted(3)


def test_padding_that_breaks_changes_no_text() -> None:
    answers = [text.token_ids for text in collect(Parts(target_of(tiny_model("llama")), NoDrafter(), Greedy()),
                                                  [[3, 5, 8], [4, 6, 9, 11, 13]], Limits(4))]  # fmt: skip
    assert all(0 not in answer for answer in answers)
    parts = Parts(spoilt(embedding=0), NoDrafter(), Greedy())
    found = collect(parts, [[3, 5, 8], [4, 6, 9, 11, 13]], Limits(4), max_rows=2)
    assert [text.token_ids for text in found] == answers


SETTINGS: Sequence[dict[str, Any]] = [
    {"repetition_penalty": 1.2},
    {"no_repeat_ngram_size": 2},
    {"min_new_tokens": 2},
    {"suppress_tokens": [4]},
    {"bad_words_ids": [[4]]},
    {"exponential_decay_length_penalty": (2, 1.1)},
    {"temperature": 0.7, "top_k": 5},
    {"top_h": 0.5},
    {"top_p": 0.5},
    {"min_p": 0.1},
    {"typical_p": 0.5},
    {"epsilon_cutoff": 0.1},
    {"eta_cutoff": 0.1},
    {"renormalize_logits": True},
]


@pytest.mark.parametrize("rule", [Greedy(), Typical(1.0)])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: next(iter(settings)))
@pytest.mark.parametrize("broken", [{"embedding": 7}, {"output": 7, "number": INF}])
def test_settings_of_generation_hide_no_broken_number(
    settings: dict[str, Any], rule: AcceptanceRule, broken: dict[str, Any]
) -> None:
    target = spoilt(**broken)
    shaping = shaping_of(settings, frozenset({2}), target.device)
    with pytest.raises(TargetError, match="not finite"):
        collect(Parts(target, oracle(), rule, shaping), [[3, 5, 7, 9]], Limits(8))


def test_a_model_that_asks_for_broken_numbers_to_be_mended_is_followed() -> None:
    target = spoilt(output=7, number=INF)
    shaping = shaping_of({"remove_invalid_values": True}, frozenset(), target.device)
    [text] = collect(Parts(target, oracle(), Greedy(), shaping), [[3, 5, 8, 9]], Limits(4))
    ids = torch.tensor([[3, 5, 8, 9]])
    written = target.model.generate(ids, remove_invalid_values=True, do_sample=False, max_new_tokens=4)
    assert text.token_ids == written[0, 4:].tolist()


def test_numbers_too_large_for_float16_are_no_damage() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1e5)
    settings = TargetSettings(model="tiny", dtype="float16", device="cpu", runner="eager")
    target = make_target(model.to(torch.float16), None, settings)
    with pytest.raises(TargetError) as failed:
        collect(Parts(target, NoDrafter(), Greedy()), [[3, 5, 8, 9]], Limits(4))
    assert "not finite in float16" in failed.value.message
    assert "model.layers.1.mlp.down_proj" in failed.value.message
    assert "--dtype bfloat16 or float32" in failed.value.hint


def test_a_broken_step_is_taken_again_without_guesses_and_drafters_are_told() -> None:
    class Counting(Tempting):
        num_kept = 0

        def keep(self, context: Context, taps_BDLH: Tensor | None) -> None:
            assert [list(tokens)[-1] for tokens in context.tokens] == context.root_B.tolist()
            self.num_kept += 1

    token = unwritten()
    drafter = Counting(token)
    [text] = collect(Parts(spoilt(embedding=token), drafter, Greedy()), TEXTS().prompts[:1], Limits(5))
    assert text.num_nodes == [1, 1, 1, 1]
    assert drafter.num_kept == 4
