"""Prompts for generate, bench and distillation."""

import json
from collections import Counter
from pathlib import Path

import pytest

import medusa_cli.bench
from medusa_cli.data.conversations import Message
from medusa_cli.data.prompts import Prompt, read_prompts
from medusa_cli.errors import DataError

OWN_SET = Path(medusa_cli.bench.__file__).parent / "prompts" / "default.jsonl"


def write(folder: Path, text: str, name: str = "prompts.jsonl") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def test_every_kind_of_row_is_a_prompt(tmp_path: Path) -> None:
    rows = [
        {"id": 12, "category": "math", "turns": ["One", "Two"]},
        {"prompt": "Hi", "id": None, "category": None},
        {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]},
        {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]},
        {"prompt": "Asked", "response": "dropped"},
    ]
    assert read_prompts(write(tmp_path, "\n".join(map(json.dumps, rows)))) == [
        Prompt("12", "math", [Message("user", "One")]),
        Prompt("2", "all", [Message("user", "Hi")]),
        Prompt("3", "all", [Message("system", "S"), Message("user", "U")]),
        Prompt("4", "all", [Message("user", "Q")]),
        Prompt("5", "all", [Message("user", "Asked")]),
    ]


def test_a_text_file_has_one_prompt_a_line(tmp_path: Path) -> None:
    prompts = read_prompts(write(tmp_path, "Hi there\n\n  안녕 😀 \n", "p.txt"))
    assert [(p.id, p.messages[0].content) for p in prompts] == [("1", "Hi there"), ("3", "안녕 😀")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompts"),
        ("\n\n", "holds no prompts"),
        ('{"prompt": "a"}\n{"prompt": ""}', "row 2, field messages[0]: an empty user message"),
        ('{"prompt": "a"}\n{"body": "b"}', "row 2, field body: none of the known fields"),
        ('{"id": 1, "prompt": "a"}\n{"id": 1, "prompt": "b"}', "row 2, field id: '1' names an earlier row too"),
        ('{"prompt": "a"}\n{', "line 2: broken JSON"),
    ],
)
def test_a_prompts_file_with_a_fault_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        read_prompts(write(tmp_path, text))
    assert message in caught.value.message
    assert "prompts.jsonl" in caught.value.message


def test_a_missing_prompts_file_is_an_error_and_no_look_at_the_hub() -> None:
    with pytest.raises(DataError, match="no such prompts file: nowhere"):
        read_prompts(Path("nowhere"))


def test_the_projects_own_prompts_cover_six_categories_evenly() -> None:
    prompts = read_prompts(OWN_SET)
    assert Counter(prompt.category for prompt in prompts) == {
        name: 8 for name in ("writing", "reasoning-math", "coding", "summarization", "translation", "qa")
    }
    texts = [prompt.messages[0].content for prompt in prompts]
    assert len(set(texts)) == 48
    for prompt, text in zip(prompts, texts, strict=True):
        if prompt.category == "summarization":
            assert 80 <= len(text.split()) <= 180
