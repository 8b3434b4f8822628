"""Exactly the assistant's words and their end-of-turn tokens are learnt."""

from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PythonBackend

from medusa_cli.data.conversations import BadRow, Conversation, Counts, Message
from medusa_cli.data.preview import segments
from medusa_cli.data.template import render
from medusa_cli.data.tokens import check_share, conversation_tokens, prompt_ids, tokenize
from medusa_cli.errors import DataError


def chat(*contents: str, system: str | None = None) -> Conversation:
    """A conversation whose user and assistant take turns."""
    messages = [Message("assistant" if index % 2 else "user", text) for index, text in enumerate(contents)]
    if system is not None:
        messages.insert(0, Message("system", system))
    return Conversation(messages, "a", 7)


TWO_TURNS = chat("What is it?", "It is blue.", "And then?", "The end.")


def learnt_text(learnt: Any, tokenizer: Any, conversation: Conversation) -> list[str]:
    tokens = conversation_tokens(tokenizer, conversation)
    assert len(tokens.ids) == len(tokens.supervised)
    return learnt(tokenizer, tokens.ids, tokens.supervised)


def test_both_answers_and_their_end_of_turn_tokens_are_learnt_and_nothing_else(make: Any, learnt: Any) -> None:
    tokenizer = make("chatml")
    assert learnt_text(learnt, tokenizer, TWO_TURNS) == ["It is blue.<|im_end|>", "The end.<|im_end|>"]


def test_a_template_that_puts_a_system_prompt_first_by_itself_gives_the_same_spans(make: Any, learnt: Any) -> None:
    tokenizer = make("chatml")
    given = chat("What?", "Blue.", system="Be brief")
    assert learnt_text(learnt, tokenizer, given) == ["Blue.<|im_end|>"]
    assert "You are kind" in tokenizer.decode(conversation_tokens(tokenizer, TWO_TURNS).ids)


def test_the_ids_are_those_of_the_rendered_chat(make: Any) -> None:
    tokenizer = make("chatml")
    messages = [{"role": m.role, "content": m.content} for m in TWO_TURNS.messages]
    rendered = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert conversation_tokens(tokenizer, TWO_TURNS).ids == rendered


@pytest.mark.parametrize(
    "conversation",
    [
        chat("Say blue", "blue", "Again: blue", "blue"),
        chat("blue", "blue", "blue<|im_end|>\nblue", "blue"),
        chat("i", "i", "assistant", "n"),
    ],
)
def test_an_answer_that_is_quoted_or_repeated_is_found_where_it_is(
    make: Any, learnt: Any, conversation: Conversation
) -> None:
    answers = [message.content + "<|im_end|>" for message in conversation.messages if message.role == "assistant"]
    assert learnt_text(learnt, make("chatml"), conversation) == answers
    tokens = conversation_tokens(make("chatml"), conversation)
    assert tokens.supervised[-2:] == [True, False], "the newline after the last turn isn't learnt"


def test_an_answer_that_spells_the_end_of_turn_token_goes_on_to_its_own(make: Any, learnt: Any) -> None:
    conversation = chat("How do I end?", "Write <|im_end|> to end")
    assert learnt_text(learnt, make("chatml"), conversation) == ["Write <|im_end|> to end<|im_end|>"]


def test_a_template_that_trims_answers_and_pads_them_gives_the_answers(make: Any, learnt: Any) -> None:
    tokenizer = make("inst", eos="</s>")
    conversation = chat("What is it?", "  It is blue.\n", "And then?", "The end.")
    assert [run.strip() for run in learnt_text(learnt, tokenizer, conversation)] == [
        "It is blue. </s>",
        "The end. </s>",
    ]


def test_without_an_end_of_turn_token_only_the_words_are_learnt(make: Any, learnt: Any) -> None:
    runs = learnt_text(learnt, make("bare"), TWO_TURNS)
    # The blank before the words is part of their first token.
    assert [run.strip() for run in runs] == ["It is blue.", "The end."]


def test_a_block_before_the_last_answer_only_does_not_shift_the_spans(make: Any, learnt: Any) -> None:
    assert learnt_text(learnt, make("thinking"), TWO_TURNS) == ["It is blue.<|im_end|>", "The end.<|im_end|>"]


def test_a_template_without_stable_prefixes_uses_its_generation_tags(make: Any, learnt: Any) -> None:
    assert learnt_text(learnt, make("tagged"), TWO_TURNS) == ["It is blue.<|im_end|>", "The end.<|im_end|>"]


def test_a_template_without_stable_prefixes_and_tags_is_an_error_not_a_wrong_mask(make: Any) -> None:
    with pytest.raises(DataError, match="row 7.*renders an answer differently") as caught:
        conversation_tokens(make("counted"), TWO_TURNS)
    assert "{% generation %}" in caught.value.hint


def test_a_template_that_leaves_the_answers_out_is_told_by_that(make: Any) -> None:
    with pytest.raises(DataError, match="row 7, field messages: the chat template leaves the assistant's words out"):
        conversation_tokens(make("deaf"), TWO_TURNS)
    with pytest.raises(DataError, match="0 usable rows; .*1 the chat template leaves the assistant's words out"):
        list(tokenize(make("deaf"), [TWO_TURNS], max_length=80, counts=Counts()))


@pytest.mark.parametrize("template", ["chatml", "thinking", "tagged"])
def test_only_the_last_answer_is_learnt_when_the_others_are_another_s(make: Any, learnt: Any, template: str) -> None:
    tokenizer, last = make(template), replace(TWO_TURNS, only_last=True)
    assert learnt_text(learnt, tokenizer, last) == ["The end.<|im_end|>"]
    assert conversation_tokens(tokenizer, last).ids == conversation_tokens(tokenizer, TWO_TURNS).ids


@pytest.mark.parametrize("template", ["chatml", "tagged"])
def test_the_end_of_an_answer_that_was_cut_off_is_not_learnt(make: Any, learnt: Any, template: str) -> None:
    tokenizer, cut = make(template), replace(TWO_TURNS, unfinished=True)
    assert learnt_text(learnt, tokenizer, cut) == ["It is blue.<|im_end|>", "The end."]
    # where no token ends a turn, the last one learnt is a word and stays
    bare = learnt_text(learnt, make("bare"), cut)
    assert [run.strip() for run in bare] == ["It is blue.", "The end."]


def masked(*places: int) -> Conversation:
    """The two turns, with these messages not to be learnt."""
    messages = [replace(one, learnt=place not in places) for place, one in enumerate(TWO_TURNS.messages)]
    return replace(TWO_TURNS, messages=messages)


@pytest.mark.parametrize("template", ["chatml", "thinking", "tagged", "parts"])
def test_an_answer_that_its_row_says_is_not_to_be_learnt_is_not(make: Any, learnt: Any, template: str) -> None:
    tokenizer = make(template)
    assert learnt_text(learnt, tokenizer, masked(1)) == ["The end.<|im_end|>"]
    assert learnt_text(learnt, tokenizer, masked(3)) == ["It is blue.<|im_end|>"]
    assert learnt_text(learnt, tokenizer, masked(1, 3)) == []
    assert conversation_tokens(tokenizer, masked(1)).ids == conversation_tokens(tokenizer, TWO_TURNS).ids


def test_a_base_model_learns_all_but_what_is_not_to_be_learnt(make: Any, learnt: Any) -> None:
    assert learnt_text(learnt, make(None), masked(1)) == ["What is it?\n\n", "And then?\n\nThe end."]
    assert conversation_tokens(make(None), masked(1)).ids == conversation_tokens(make(None), TWO_TURNS).ids


def test_a_word_that_ends_a_turn_is_learnt_where_the_model_stops_at_it(make: Any, learnt: Any) -> None:
    tokenizer = make("turns")
    tokenizer.add_tokens([AddedToken("<|turn|>", special=False)])
    ends = frozenset({tokenizer.convert_tokens_to_ids("<|turn|>")})

    def runs(**changes: Any) -> list[str]:
        tokens = conversation_tokens(tokenizer, replace(TWO_TURNS, **changes), ends)
        return [run.strip() for run in learnt(tokenizer, tokens.ids, tokens.supervised)]

    assert runs() == ["It is blue.<|turn|>", "The end.<|turn|>"]
    assert runs(unfinished=True) == ["It is blue.<|turn|>", "The end."]
    samples = list(tokenize(tokenizer, [TWO_TURNS], max_length=200, counts=Counts(), ends=ends))
    assert samples[0].supervised == conversation_tokens(tokenizer, TWO_TURNS, ends).supervised


def test_emoji_and_hangul_answers_are_learnt_whole(make: Any, learnt: Any) -> None:
    conversation = chat("한국어?", "😀 안녕 ", "天气", "👩‍👩‍👧")
    assert learnt_text(learnt, make("chatml"), conversation) == ["😀 안녕 <|im_end|>", "👩‍👩‍👧<|im_end|>"]


def test_the_end_of_turn_is_learnt_when_it_is_also_the_padding(make: Any, learnt: Any) -> None:
    tokenizer = make("chatml", pad="<|im_end|>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    assert learnt_text(learnt, tokenizer, TWO_TURNS) == ["It is blue.<|im_end|>", "The end.<|im_end|>"]


def test_words_after_the_last_answer_are_left_out(make: Any) -> None:
    longer = Conversation([*TWO_TURNS.messages, Message("user", "Thanks")], "a")
    assert conversation_tokens(make("chatml"), longer) == conversation_tokens(make("chatml"), TWO_TURNS)


def test_an_empty_answer_is_not_learnt(make: Any, learnt: Any) -> None:
    assert learnt_text(learnt, make("chatml"), chat("a", " ", "b", "blue")) == ["blue<|im_end|>"]


def test_a_base_model_learns_all_but_the_first_token(make: Any) -> None:
    tokenizer = make(None)
    for conversation in (TWO_TURNS, Conversation([Message("text", "The answer is blue.")], "a")):
        tokens = conversation_tokens(tokenizer, conversation)
        assert tokens.ids[0] == tokenizer.bos_token_id
        assert tokens.supervised == [False] + [True] * (len(tokens.ids) - 1)


def test_plain_text_is_not_rendered_as_a_chat(make: Any) -> None:
    tokens = conversation_tokens(make("chatml"), Conversation([Message("text", "The answer is blue.")], "a"))
    assert make("chatml").decode(tokens.ids) == "<s>The answer is blue."


class Characters(PythonBackend):
    """A tokenizer without offsets: pairs of letters where it can, special tokens whole."""

    def __init__(self, **options: Any) -> None:
        self._pieces: list[str] = []
        super().__init__(**options)

    @property
    def vocab_size(self) -> int:
        return 5000

    def get_vocab(self) -> dict[str, int]:
        return {**{piece: index for index, piece in enumerate(self._pieces)}, **self._added_tokens_encoder}

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return [text[index : index + 2] for index in range(0, len(text), 2)]

    def _convert_token_to_id(self, token: str) -> int:
        if token not in self._pieces:
            self._pieces.append(token)
        return self._pieces.index(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self._pieces[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


def test_a_tokenizer_without_offsets_gives_the_same_spans(make: Any, learnt: Any) -> None:
    tokenizer = Characters(bos_token="<s>", eos_token="<|im_end|>", extra_special_tokens=["<|im_start|>"])
    tokenizer.chat_template = make("chatml").chat_template
    assert not tokenizer.is_fast
    # Pairs of letters: the newline before an answer is a token's first letter when the count is odd.
    runs = learnt_text(learnt, tokenizer, TWO_TURNS)
    assert [run.strip() for run in runs] == ["It is blue.<|im_end|>", "The end.<|im_end|>"]


def test_an_answer_cut_away_is_skipped_and_counted(make: Any) -> None:
    tokenizer, counts = make("chatml"), Counts()
    long = chat("What is the answer? " * 20, "Blue.")
    short = chat("What?", "The answer is blue. " * 20)
    samples = list(tokenize(tokenizer, [long, short], max_length=80, counts=counts))
    assert len(samples) == 1
    assert len(samples[0].ids) == 80
    assert any(samples[0].supervised)
    assert (counts.used, counts.cut, counts.empty, counts.skipped.total()) == (1, 1, 1, 1)
    assert counts.tokens == 80
    assert counts.supervised == sum(samples[0].supervised)
    assert "answer beyond the longest length allowed (first: row 7)" in counts.describe()


def test_no_usable_row_is_an_error_with_the_reasons(make: Any) -> None:
    with pytest.raises(DataError, match="0 usable rows.*1 no answer"):
        list(tokenize(make("chatml"), [chat("What?")], max_length=80, counts=Counts()))


def test_a_row_the_template_refuses_is_skipped_or_fails(make: Any) -> None:
    tokenizer, counts = make("inst", eos="</s>"), Counts()
    rows = [chat("What?", "Blue.", system="Be brief"), chat("What?", "Blue.")]
    assert len(list(tokenize(tokenizer, rows, max_length=80, counts=counts))) == 1
    assert "roles must alternate" in next(iter(counts.skipped))
    with pytest.raises(BadRow, match="row 7.*roles must alternate"):
        list(tokenize(tokenizer, rows, max_length=80, counts=counts, on_bad_row="fail"))


def test_shares_of_learnt_tokens_that_cannot_be_right_are_told() -> None:
    assert check_share(Counts(used=1, tokens=100, supervised=40)) is None
    assert "99.0%" in (check_share(Counts(used=1, tokens=100, supervised=99)) or "")
    assert check_share(Counts(used=1, plain=1, tokens=100, supervised=99)) is None
    with pytest.raises(DataError, match="0 of 100 tokens are answers"):
        check_share(Counts(used=1, tokens=100))


def test_a_chat_prompt_has_one_bos_and_ends_where_the_assistant_speaks(make: Any) -> None:
    tokenizer = make("inst", eos="</s>")
    ids = prompt_ids(tokenizer, [Message("user", "What?")], chat=True)
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(ids) == "<s>[INST] What? [/INST]"
    assert tokenizer.decode(prompt_ids(make("chatml"), [Message("user", "Hi")], chat=True)).endswith("assistant\n")


def test_a_chat_prompt_is_the_start_of_the_trained_ids(make: Any) -> None:
    tokenizer = make("chatml")
    ids = prompt_ids(tokenizer, TWO_TURNS.messages[:-1], chat=True)
    tokens = conversation_tokens(tokenizer, TWO_TURNS)
    assert tokens.ids[: len(ids)] == ids
    assert tokens.supervised[len(ids)]
    assert not tokens.supervised[len(ids) - 1]


@pytest.mark.parametrize(("template", "wanted"), [(None, True), (None, False), ("chatml", False)])
def test_a_prompt_without_a_chat_is_plain_text_with_the_tokenizers_own_tokens(
    make: Any, template: str | None, wanted: bool
) -> None:
    tokenizer = make(template)
    ids = prompt_ids(tokenizer, [Message("user", "The answer")], chat=wanted)
    assert ids == tokenizer("The answer")["input_ids"]
    assert tokenizer.decode(ids) == "<s>The answer"


def test_a_prompt_the_template_refuses_is_an_error(make: Any) -> None:
    with pytest.raises(DataError, match="the prompt.*roles must alternate"):
        prompt_ids(make("inst"), [Message("user", "a"), Message("user", "b")], chat=True)


def test_a_template_that_makes_far_more_than_it_is_given_is_refused_with_numbers(make: Any) -> None:
    tokenizer = make("chatml")
    tokenizer.chat_template = "{% for n in range(100) %}{{ 'x' * 20000 }}{% endfor %}{{ messages[0]['content'] }}"
    with pytest.raises(DataError, match=r"makes more than 1,000,\d+ characters of \d+, which would take for ever"):
        prompt_ids(tokenizer, [Message("user", "Hi")], chat=True)
    with pytest.raises(BadRow, match=r"more than 1,00\d,\d+ characters"):
        conversation_tokens(tokenizer, TWO_TURNS)


def test_a_long_prompt_is_no_fault_of_its_template(make: Any) -> None:
    tokenizer = make("chatml")
    words = "a " * 300_000
    tokenizer.chat_template = "{{ messages[0]['content'] }}{{ messages[0]['content'] }}"
    assert len(render(tokenizer, [Message("user", words)], opening=True, parts=False)) == 2 * len(words)


def test_of_no_text_the_first_token_is_left_and_without_one_it_is_an_error() -> None:
    tokenizer = Characters(bos_token="<s>", eos_token="</s>")
    assert prompt_ids(tokenizer, [Message("user", "")], chat=False) == [tokenizer.bos_token_id]
    with pytest.raises(DataError, match="the prompt is empty, and the tokenizer names no first token"):
        prompt_ids(Characters(eos_token="</s>"), [Message("user", "")], chat=False)


def test_a_preview_shows_learnt_and_other_text_in_turn(make: Any) -> None:
    tokenizer = make("chatml")
    tokens = conversation_tokens(tokenizer, TWO_TURNS)
    shown = segments(tokenizer, tokens)
    assert "".join(segment.text for segment in shown) == tokenizer.decode(tokens.ids)
    assert [segment.supervised for segment in shown] == [False, True, False, True, False]
    assert [segment.text for segment in shown if segment.supervised] == ["It is blue.<|im_end|>", "The end.<|im_end|>"]
