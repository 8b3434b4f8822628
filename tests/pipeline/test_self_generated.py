"""Prompts and answers: what is asked, what is left out, and what a stop leaves behind."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_cli.config.recipe import DataSettings
from medusa_cli.data.distill import (
    Steered,
    Written,
    read_prompts_of_its_own,
    read_written,
    steered,
    user_prefix,
    write_prompts,
)
from medusa_cli.errors import DataError


class Words:
    """A tokenizer of words; the chat template puts `user:` in front."""

    chat_template: str | None = "there is one"
    bos_token_id: int | None = None
    eos_token_id = 7

    def __call__(self, text: str, add_special_tokens: bool) -> Any:
        self.asked = add_special_tokens
        return type("Encoded", (), {"input_ids": list(map(len, text.split()))})

    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> str:
        return f"user: {messages[0]['content']} assistant:"

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return " ".join("word" for _ in ids)


def settings(**changes: Any) -> DataSettings:
    return DataSettings(
        **{"num_samples": 5, "openings": ("", "Write ", "Explain {topic}"), "topics": ("tea",), **changes}
    )


def test_openings_come_in_shuffled_rounds_with_the_template_in_front() -> None:
    prompts = steered(settings(), Words(), seed=0)
    assert [prompt.id for prompt in prompts] == list(range(5))
    assert sorted(prompt.opening for prompt in prompts[:3]) == ["", "Explain tea", "Write "]
    assert user_prefix(Words()) == "user: "
    by_opening = {prompt.opening: prompt.ids for prompt in prompts}
    # the space before the next word is the target's to write
    assert by_opening == {"": [5], "Write ": [5, 5], "Explain tea": [5, 7, 3]}


def test_more_samples_begin_with_the_same_openings() -> None:
    topics = tuple(map(str, range(50)))
    few, many = (steered(settings(num_samples=count, topics=topics), Words(), seed=3) for count in (4, 9))
    assert [prompt.opening for prompt in many[:4]] == [prompt.opening for prompt in few]


def test_a_base_model_starts_from_its_special_tokens_and_from_something_at_least() -> None:
    base = Words()
    base.chat_template = None
    prompts = {prompt.opening: prompt.ids for prompt in steered(settings(), base, seed=0)}
    assert base.asked is True
    assert prompts[""] == [7]
    base.bos_token_id = 1
    assert {p.opening: p.ids for p in steered(settings(), base, seed=0)}[""] == [1]


def test_a_template_that_changes_the_user_s_text_is_refused() -> None:
    odd = Words()
    odd.apply_chat_template = lambda messages, **_: "always the same"  # type: ignore[method-assign]
    with pytest.raises(DataError, match="leaves the user's words out"):
        user_prefix(odd)
    odd.apply_chat_template = lambda messages, **_: messages[0]["content"].replace("text", "TEXT")  # type: ignore
    with pytest.raises(DataError, match="changes the user's text"):
        user_prefix(odd)


def test_an_id_that_ends_a_turn_is_no_word_of_a_prompt(tmp_path: Path) -> None:
    def write(missing: Sequence[Steered]) -> Iterator[Written]:
        yield Written(0, [4, 5, 9], "stop", torch.empty(0))

    list(write_prompts([Steered(0, "Write ", [5])], tmp_path / "a", Words(), write, frozenset({9})))
    assert json.loads((tmp_path / "a").read_text())["prompt"] == "Writeword word"


def test_only_missing_prompts_are_written_and_a_line_cut_by_a_kill_is_one(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": 1, "prompt": "a", "tokens": 2}\n{"id": 0, "prom')
    wanted = [Steered(number, "Go ", [number]) for number in range(3)]
    asked: list[list[int]] = []

    def write(prompts):
        asked.extend(prompt.ids for prompt in prompts)
        yield Written(1, [4, 4, 4], "stop", None)  # type: ignore[arg-type]
        yield Written(0, [4], "stop", None)  # type: ignore[arg-type]

    assert list(write_prompts(wanted, file, Words(), write)) == [3, 1]
    assert asked == [[0], [2]]
    assert [(row["id"], row["prompt"]) for row in read_written(file)] == [
        (1, "a"),
        (2, "Goword word word"),
        (0, "Goword"),
    ]


def test_a_damaged_file_of_prompts_is_told(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("no json\n" + json.dumps({"id": 1}) + "\n")
    with pytest.raises(DataError, match=r"prompts\.jsonl is damaged"):
        read_written(file)
    for row in ("[]", json.dumps({"id": 1}), json.dumps({"id": "1", "prompt": "a", "tokens": 1})):
        file.write_text(row + "\n")
        with pytest.raises(DataError, match=r"prompts\.jsonl is damaged") as caught:
            read_prompts_of_its_own(file)
        assert caught.value.hint == "delete it to have it written again"
