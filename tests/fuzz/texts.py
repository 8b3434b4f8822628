"""Files that people write: recipes, prompts and conversations."""

import json
import shutil
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from medusa_cli.bench.prompt_set import read_questions
from medusa_cli.config.loading import load_recipe, resolved
from medusa_cli.data.conversations import Counts, read_conversations
from medusa_cli.data.prompts import read_prompts
from medusa_cli.data.tokens import prompt_ids, tokenize
from tests.fuzz.kind import QUICK, Kind
from tests.fuzz.models import make_folder


def _recipe(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("demo", "medusa-2-llama-3.1-8b"):
        shutil.copy(Path(__file__).parents[2] / "recipes" / f"{name}.yaml", folder / f"{name}.yaml")


def _read_recipe(folder: Path, victim: str) -> None:
    resolved(load_recipe(folder / victim))


ROWS: list[dict[str, Any]] = [
    {"id": "a", "messages": [{"role": "user", "content": "Hi?"}, {"role": "gpt", "content": "Yes.", "weight": 1}]},
    {"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Yes.", "train": True}]},
    {"instruction": "Say it", "input": "It", "output": "It is."},
    {"prompt": "Why?", "response": "So."},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "A"}]}, {"role": "gpt", "content": "B"}]},
    {"text": "It is blue."},
]
PROMPTS = [{"id": f"p{number}", "category": "x", "turns": [f"What is {number}?"]} for number in range(4)]


def make_data(folder: Path) -> None:
    make_folder(folder / "model")
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "chats.json").write_text(json.dumps(ROWS))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    (folder / "prompts.txt").write_text("What is it?\nWhy is it blue?\n")


def _read_data(folder: Path, victim: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    if victim.startswith("prompts"):
        read_questions(folder / victim)
        for prompt in read_prompts(folder / victim):
            prompt_ids(tokenizer, prompt.messages, chat=True)
    else:
        counts = Counts()
        rows = read_conversations(str(folder / victim), split="train", counts=counts)
        list(tokenize(tokenizer, rows, max_length=200, counts=counts))
        counts.describe()


def _with_data(folder: Path, victim: str) -> list[object]:
    if victim.startswith("prompts"):
        return ["generate", "--prompt-file", folder / victim, "-m", folder / "model", *QUICK]
    return [
        "train-heads",
        "-m",
        folder / "model",
        "--dataset",
        folder / victim,
        "--preview-masks",
        "--dtype",
        "float32",
    ]


RECIPE = Kind(
    _recipe,
    {"demo.yaml": "yaml", "medusa-2-llama-3.1-8b.yaml": "yaml"},
    _read_recipe,
    lambda folder, victim: ["train-heads", "-c", folder / victim, "--plan", "-o", folder / "run"],
)
DATA = Kind(
    make_data,
    {"chats.jsonl": "jsonl", "chats.json": "json", "prompts.jsonl": "jsonl", "prompts.txt": "text"},
    _read_data,
    _with_data,
)
