"""Prompts are read, spread, and looked at for what would mislead."""

import random
from pathlib import Path

import pytest

from medusa_cli.bench.prompt_set import Question, pick, random_looking, read_questions, repeated
from medusa_cli.errors import DataError


def _encode(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def _zipf(rng: random.Random, vocab_size: int, count: int) -> str:
    """Ids whose frequencies fall as 1 / rank, as in any natural language."""
    weights = [1 / rank for rank in range(1, vocab_size + 1)]
    return " ".join(map(str, rng.choices(range(vocab_size), weights, k=count)))


def _uniform(rng: random.Random, vocab_size: int, count: int) -> str:
    return " ".join(str(rng.randrange(vocab_size)) for _ in range(count))


def _ask(texts: list[str]) -> list[Question]:
    return [Question(f"p{n}", "all", text) for n, text in enumerate(texts)]


@pytest.mark.parametrize("vocab_size", [5_000, 32_000, 262_144])
def test_random_tokens_are_told_from_text_in_any_vocabulary(vocab_size: int) -> None:
    rng = random.Random(0)
    for _ in range(20):
        assert len(random_looking(_ask([_uniform(rng, vocab_size, 256)]), _encode, vocab_size)) == 1
        assert random_looking(_ask([_zipf(rng, vocab_size, 256)]), _encode, vocab_size) == []


def test_short_random_prompts_are_judged_together() -> None:
    rng = random.Random(1)
    short = [_uniform(rng, 32_000, 20) for _ in range(10)]
    assert len(random_looking(_ask(short), _encode, 32_000)) == 10
    assert random_looking(_ask(short[:2]), _encode, 32_000) == [], "40 tokens are too few to claim anything"


def test_one_random_prompt_repeated_is_still_found() -> None:
    prompt = _uniform(random.Random(2), 32_000, 120)
    assert random_looking(_ask([prompt] * 5), _encode, 32_000) == ["p0", "p1", "p2", "p3", "p4"]


def test_a_tiny_vocabulary_is_never_accused() -> None:
    assert random_looking(_ask([_uniform(random.Random(3), 97, 500)]), _encode, 97) == []


def test_the_same_prompt_twice_is_noted() -> None:
    assert repeated(_ask(["a", "b", "a"])) == [["p0", "p2"]]


def test_a_few_prompts_are_spread_over_the_whole_file() -> None:
    questions = _ask([str(n) for n in range(10)])
    assert [question.text for question in pick(questions, 4)] == ["0", "2", "5", "7"]
    assert pick(questions, None) == pick(questions, 99) == questions


def test_turns_and_prompt_are_read_and_only_the_first_turn_counts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": 7, "category": "qa", "turns": ["Why?", "And?"]}\n\n{"prompt": "Wer bin ich?"}\n')
    assert read_questions(file) == [Question("7", "qa", "Why?"), Question("3", "all", "Wer bin ich?")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no prompts"),
        ('{"id": "a", "turns": []}\n', "row 1, field turns: a list with at least one text expected"),
        ('{"id": "a", "system": "S", "prompt": "x"}\n', "the prompt 'a' is a conversation of 2 messages"),
    ],
)
def test_a_file_that_is_no_set_of_questions_is_refused_by_its_row(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(DataError) as error:
        read_questions(file)
    assert said in error.value.message


def test_questions_may_stand_in_any_file_of_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("Why?\n\nWho?\n")
    assert read_questions(file) == [Question("1", "all", "Why?"), Question("3", "all", "Who?")]
