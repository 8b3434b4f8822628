"""Chat templates of every kind: what they are given, and what is said of those that fail."""

from typing import Any

import pytest

from medusa_cli.data.conversations import Message
from medusa_cli.data.template import template_text
from medusa_cli.data.tokens import conversation_tokens, prompt_ids
from medusa_cli.errors import DataError
from tests.data.test_tokens import TWO_TURNS, learnt_text


def asked(tokenizer: Any, text: str) -> list[int]:
    return prompt_ids(tokenizer, [Message("user", text)], chat=True)


def test_a_template_that_reads_parts_is_given_parts(make: Any, learnt: Any) -> None:
    tokenizer = make("parts")
    messages = [Message("system", "Be kind"), Message("user", "What?")]
    said = tokenizer.decode(prompt_ids(tokenizer, messages, chat=True))
    assert said == "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"
    assert learnt_text(learnt, tokenizer, TWO_TURNS) == ["It is blue.<|im_end|>", "The end.<|im_end|>"]


def test_a_template_that_leaves_the_user_s_words_out_is_refused(make: Any) -> None:
    tokenizer = make("chatml")
    tokenizer.chat_template = "{{ messages | length }} messages"
    with pytest.raises(DataError, match="the prompt, field messages: the chat template leaves the user's words out"):
        asked(tokenizer, "a")
    with pytest.raises(DataError, match="row 7, .*leaves the user's words out"):
        conversation_tokens(tokenizer, TWO_TURNS)


@pytest.mark.parametrize("template", ["adds", "includes", "broken", "divides", "deep"])
def test_a_template_that_fails_is_told_in_one_line(template: str, make: Any) -> None:
    with pytest.raises(DataError, match="the prompt, field messages: the chat template fails .*: ") as caught:
        asked(make(template), "What?")
    assert "\n" not in caught.value.message
    assert "chat_template.jinja" in caught.value.hint
    with pytest.raises(DataError, match="row 7.*the chat template fails"):
        conversation_tokens(make(template), TWO_TURNS)


def test_several_templates_without_a_default_are_told_by_name(make: Any) -> None:
    tokenizer = make("chatml")
    tokenizer.chat_template = {"tools": "a", "rag": "b"}
    with pytest.raises(DataError, match=r"several chat templates \(tools, rag\), and none of them is the default"):
        asked(tokenizer, "What?")
    with pytest.raises(DataError, match="none of them is the default"):
        conversation_tokens(tokenizer, TWO_TURNS)
    tokenizer.chat_template = {"tools": "a", "default": make("chatml").chat_template}
    assert asked(tokenizer, "What?") == asked(make("chatml"), "What?")


def test_a_template_that_is_no_text_is_told(make: Any) -> None:
    tokenizer = make("chatml")
    tokenizer.chat_template = 5
    with pytest.raises(DataError, match="the chat template is no text, but int"):
        template_text(tokenizer)


def test_a_template_whose_opening_words_given_answers_lack_is_told_by_them(make: Any) -> None:
    with pytest.raises(DataError, match=r"row 7.*opens the assistant's turn with '<think>\\n'") as caught:
        conversation_tokens(make("r1"), TWO_TURNS)
    assert "--answers-from self" in caught.value.hint
    assert make("r1").decode(asked(make("r1"), "What?")).endswith("<think>\n")
