"""What heads remember of their target beside its weights: each thing that changed is named, words are refused."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from medusa_cli.errors import HeadsMismatch
from medusa_cli.heads.config import check_belongs
from medusa_cli.heads.traits import Traits, differences, traits_of
from medusa_cli.model.loading.load import rows_of
from medusa_cli.model.target import Target
from tests.tiny_folders import CHAT_TEMPLATE, tiny_config, tiny_tokenizer
from tests.tiny_heads import FakeTarget, some_heads
from tests.tiny_models import target_of, tiny_model


def tokenizer_of(words: dict[str, int] | None = None, template: str | None = CHAT_TEMPLATE) -> Any:
    """The tiny tokenizer, or one that gives these words other ids."""
    tokenizer = tiny_tokenizer(template)
    if words:
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import PreTrainedTokenizerFast

        core = Tokenizer(WordLevel({**tokenizer.get_vocab(), **words}, unk_token="w0"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="w2", pad_token="w0", unk_token="w0")
        tokenizer.chat_template = template
    return tokenizer


def target_with(tokenizer: Any, model: Any = None) -> Target:
    return target_of(model or tiny_model("llama"), tokenizer=tokenizer)


def changed(target: Target, then: Target | None = None) -> list[str]:
    """What is said of heads trained with the tiny tokenizer and model when they meet this target."""
    traits = Traits.model_validate_json(traits_of(then or target_with(tokenizer_of())).model_dump_json())
    return differences(traits, traits_of(target, traits))


def test_nothing_is_said_of_the_target_that_the_heads_were_trained_for() -> None:
    assert changed(target_with(tokenizer_of())) == []
    assert changed(target_of(tiny_model("gemma3_text")), target_of(tiny_model("gemma3_text"))) == []


def test_another_template_is_named() -> None:
    assert changed(target_with(tokenizer_of(template="{{ messages }}"))) == ["chat template"]
    assert changed(target_with(tokenizer_of(template=None))) == ["chat template"]


def test_another_way_to_cut_text_over_the_same_words_is_named() -> None:
    from tokenizers import decoders, normalizers, pre_tokenizers

    for name, part in {
        "normalizer": normalizers.Lowercase(),
        "pre_tokenizer": pre_tokenizers.Punctuation(),
        "decoder": decoders.WordPiece(),
    }.items():
        tokenizer = tokenizer_of()
        setattr(tokenizer.backend_tokenizer, name, part)
        assert changed(target_with(tokenizer)) == ["tokenizer's rules"], name


def test_other_merges_over_the_same_words_are_named() -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    words = {word: id_ for id_, word in enumerate(["<unk>", "f", "o", "x", "fo", "ox", "fox"])}

    def target(merges: list[tuple[str, str]]) -> Target:
        core = Tokenizer(BPE(words, merges, unk_token="<unk>"))
        return target_with(PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>"))

    one = target([("f", "o"), ("o", "x"), ("fo", "x")])
    other = target([("o", "x"), ("f", "o")])
    assert changed(one, one) == []
    assert changed(other, one) == ["tokenizer's rules"]


def test_heads_that_were_stored_without_the_rules_say_nothing_of_them() -> None:
    target = target_with(tokenizer_of())
    then = traits_of(target).model_copy(update={"rules": None})
    assert differences(then, traits_of(target, then)) == []


def test_another_rope_is_named_with_both_values() -> None:
    def rope_of(target: Any) -> Traits:
        return traits_of(FakeTarget(config=target))

    then, now = tiny_config(), tiny_config(rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    assert differences(rope_of(then), rope_of(now)) == ["rope_theta (10000.0 then, 500.0 now)"]
    several = {kind: {"rope_type": "default", "rope_theta": 5e5} for kind in ("full_attention", "sliding_attention")}
    now = SimpleNamespace(rope_parameters=several)
    assert "full_attention.rope_theta (None then, 500000.0 now)" in differences(rope_of(then), rope_of(now))
    assert rope_of(SimpleNamespace()).rope == {}


@pytest.mark.parametrize("where", ["model.embed_tokens.weight", "lm_head.weight"])
def test_one_changed_row_is_named(where: str) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    with torch.no_grad():
        model.get_parameter(where)[50] += 0.1
    target = target_with(tokenizer_of(), model)
    assert target.fingerprint == target_with(tokenizer_of()).fingerprint
    assert changed(target) == ["rows of embeddings or output matrix"]


def test_rows_are_the_same_in_every_dtype() -> None:
    stored = copy.deepcopy(tiny_model("llama")).to(torch.bfloat16)
    assert (
        len({rows_of(copy.deepcopy(stored).to(kind)) for kind in (torch.bfloat16, torch.float16, torch.float32)}) == 1
    )


def test_tokens_added_since_change_nothing_and_renamed_special_ones_are_named() -> None:
    grown = tokenizer_of()
    grown.add_tokens(["<new>"], special_tokens=True)
    assert changed(target_with(grown)) == []
    then = tokenizer_of()
    then.add_tokens(["<one>"], special_tokens=True)
    other = tokenizer_of()
    other.add_tokens(["<another>"], special_tokens=True)
    assert changed(target_with(other), target_with(then)) == ["added tokens"]


@pytest.mark.parametrize("words", [{"w5": 6, "w6": 5}, {f"w{number}": 99 - number for number in range(3, 97)}])
def test_ids_that_mean_other_words_are_refused(words: dict[str, int]) -> None:
    config = some_heads().config.model_copy(update={"traits": traits_of(target_with(tokenizer_of()))})
    check_belongs(config, FakeTarget(tokenizer=tokenizer_of()))
    with pytest.raises(HeadsMismatch, match="tokenizer gives ids other words") as refused:
        check_belongs(config, FakeTarget(tokenizer=tokenizer_of(words)))
    assert "the tokenizer that came with tiny" in refused.value.hint


def test_a_target_without_a_tokenizer_is_asked_for_none(caplog: pytest.LogCaptureFixture) -> None:
    config = some_heads().config.model_copy(update={"traits": traits_of(target_with(tokenizer_of()))})
    check_belongs(config, FakeTarget())
    check_belongs(config.model_copy(update={"traits": Traits()}), FakeTarget(tokenizer=tokenizer_of()))
    assert not any("token" in message or "template" in message for message in caplog.messages)


@pytest.mark.parametrize(("ids", "runs"), [([], []), ([3], [(3, 4)]), ([5, 3, 4, 9, 0], [(0, 1), (3, 6), (9, 10)])])
def test_added_ids_are_kept_as_runs(ids: list[int], runs: list[tuple[int, int]]) -> None:
    class Tokenizer:
        added_tokens_decoder = dict.fromkeys(ids)

        def get_vocab(self) -> dict[str, int]:
            return {f"w{number}": number for number in range(12)}

    assert traits_of(FakeTarget(tokenizer=Tokenizer())).added_ids == runs


@pytest.mark.parametrize("runs", [[[3, 2]], [[5, 6], [1, 2]], [[-1, 2]], [[0, 10**9]] * 20_000])
def test_runs_that_are_none_are_refused(runs: list[list[int]]) -> None:
    with pytest.raises(ValidationError):
        Traits.model_validate({"added_ids": runs})
