"""Damaged and hostile files: they are read, or refused with a sentence; nothing else ever comes out.

Each test is one function of drawn bytes, without fixtures, so that a coverage-guided fuzzer can take it (`make fuzz`).
In `make test` hypothesis draws a hundred for each.
"""

import functools
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from medusa_cli.bench.prompt_set import read_questions
from medusa_cli.config.loading import load_recipe
from medusa_cli.data.conversations import Counts, read_conversations
from medusa_cli.data.prompts import read_prompts
from medusa_cli.errors import MedusaError
from medusa_cli.formats.native import NativeFormat, write_heads
from medusa_cli.trees.files import MAX_NODES, parse_tree, read_measured, read_tree
from tests.tiny_heads import some_heads

# --- what is drawn ---

NUMBERS = st.integers() | st.floats() | st.sampled_from([2**31, 2**63, 10**400, -1, 0, 1, 3])
WORDS = st.text(max_size=12) | st.sampled_from(["user", "assistant", "human", "gpt", "\ud800", "\0", "0", "00", "1_0"])
KEYS = WORDS | st.sampled_from(
    ["paths", "plain", "conditional", "positions", "step_cost", "messages", "conversations", "role", "content", "from",
     "value", "prompt", "response", "turns", "id", "category", "target", "model", "heads", "train", "epochs"]
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)
PIECES = [b"[", b"]" * 5000, b"[" * 5000, b"{", b'"', b",", b"\n", b"-", b"\xff"]
EDITS = st.lists(
    st.tuples(
        st.integers(0, 2**16),
        st.sampled_from(["put", "cut", "flip", "end"]),
        st.binary(max_size=6)
        | st.sampled_from([b"[", b"]" * 5000, b"[" * 5000, b"{", b'"', b",", b"\n", b"-", b"\xff"]),
    ),
    max_size=4,
)


def edited(content: bytes, edits: list[tuple[int, str, bytes]]) -> bytes:
    """The content after each edit in turn."""
    for place, kind, piece in edits:
        place %= len(content) + 1
        if kind == "put":
            content = content[:place] + piece + content[place:]
        elif kind == "cut":
            content = content[:place] + content[place + len(piece) :]
        elif kind == "end":
            content = content[:place]
        elif content[place : place + 1]:
            content = content[:place] + bytes([content[place] ^ (piece[0] if piece else 1)]) + content[place + 1 :]
    return content


def damaged(*documents: Any) -> st.SearchStrategy[bytes]:
    """Valid documents with edits, other JSON, and bytes."""
    valid = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in documents]
    return (
        st.builds(edited, st.sampled_from(valid), EDITS)
        | VALUES.map(lambda value: json.dumps(value).encode())
        | st.binary(max_size=64)
    )


@contextmanager
def file_of(content: bytes, name: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / name
        file.write_bytes(content)
        yield file


def read_or_refused(read: Callable[[], Any]) -> Any:
    """What was read; None when it was refused in one line, with a hint."""
    try:
        return read()
    except MedusaError as error:
        refusal = error
    assert refusal.message.strip()
    assert refusal.hint.strip()
    return None


# --- trees ---

TREES = (
    {"paths": [[0], [0, 0], [1]], "expected_tokens": 1.5},
    [[0], [1]],
    b"choices = [[0], [0, 0]]\n",
    b"[(0,), (1,)]",
)


@given(damaged(*TREES))
@example(b"[" * 100_000)
@example(b"x = " + b"(" * 5000)
def test_a_tree_file_is_read_or_refused(content: bytes) -> None:
    with file_of(content, "tree.json") as file:
        tree = read_or_refused(lambda: read_tree(file))
    assert tree is None or 1 <= tree.num_nodes <= MAX_NODES + 1


@given(st.text(max_size=40) | st.from_regex(r"(chain:)?[0-9x]{1,12}", fullmatch=True) | VALUES.map(repr))
def test_a_tree_of_the_command_line_is_read_or_refused(spec: str) -> None:
    tree = read_or_refused(lambda: parse_tree(spec))
    assert tree is None or 1 <= tree.num_nodes <= MAX_NODES + 1


ACCURACY = {"plain": [[0.4, 0.1]], "conditional": [[0.4, 0.1]], "positions": 9, "step_cost": {"1": 0.02, "4": 0.03}}


@given(damaged(ACCURACY), damaged({"step_cost": {"1": 0.02}}))
def test_measured_accuracies_are_read_or_refused(accuracy: bytes, provenance: bytes) -> None:
    with file_of(accuracy, "accuracy.json") as file:
        (file.parent / "provenance.json").write_bytes(provenance)
        measured = read_or_refused(lambda: read_measured(file.parent))
    assert measured is None or all(0 <= chance <= 1 for row in measured.plain_KR for chance in row)


# --- heads ---


@functools.cache
def valid_heads() -> tuple[bytes, bytes]:
    """heads.safetensors and heads.json of heads that are fine."""
    with tempfile.TemporaryDirectory() as folder:
        write_heads(some_heads(sees_root=True), Path(folder))
        return (Path(folder) / "heads.safetensors").read_bytes(), (Path(folder) / "heads.json").read_bytes()


def read_heads_of(weights: bytes, description: bytes) -> Any:
    with file_of(weights, "heads.safetensors") as file:
        (file.parent / "heads.json").write_bytes(description)
        return read_or_refused(lambda: NativeFormat().read(file.parent))


@given(EDITS, EDITS)
def test_a_heads_folder_is_read_or_refused(weights_edits: Any, description_edits: Any) -> None:
    weights, description = valid_heads()
    damaged_weights = edited(weights, weights_edits)
    heads = read_heads_of(damaged_weights, edited(description, description_edits))
    assert heads is None or damaged_weights == weights, "a changed file has another checksum"


@given(EDITS, st.dictionaries(st.sampled_from(["num_heads", "num_layers", "hidden_size", "draft_vocab"]), NUMBERS))
def test_heads_with_a_right_checksum_are_read_or_refused(edits: Any, config: dict[str, Any]) -> None:
    weights, description = valid_heads()
    changed = edited(weights, edits)
    document = json.loads(description)
    document |= {"bytes": len(changed), "sha256": hashlib.sha256(changed).hexdigest()}
    document["config"] |= config
    heads = read_heads_of(changed, json.dumps(document).encode())
    assert heads is None or heads.config.num_heads == document["config"]["num_heads"]


# --- prompts, conversations, recipes ---

CHAT = {"id": "a", "messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}]}
SHARED = {"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Yes."}]}
ROWS = (CHAT, SHARED, {"prompt": "Why?", "response": "So."}, {"turns": ["Why?"], "category": "x"}, [CHAT, SHARED])
SUFFIXES = st.sampled_from([".jsonl", ".json", ".txt"])


@given(damaged(*ROWS), SUFFIXES)
def test_a_prompts_file_is_read_or_refused(content: bytes, suffix: str) -> None:
    with file_of(content, f"prompts{suffix}") as file:
        prompts = read_or_refused(lambda: read_prompts(file))
    assert prompts is None or all(prompt.messages[-1].role == "user" for prompt in prompts)


@given(damaged(*ROWS))
def test_prompts_of_a_bench_are_read_or_refused(content: bytes) -> None:
    with file_of(content, "prompts.jsonl") as file:
        questions = read_or_refused(lambda: read_questions(file))
    assert questions is None or all(question.text.strip() for question in questions)


@given(damaged(*ROWS), SUFFIXES)
def test_a_file_of_conversations_is_read_or_refused(content: bytes, suffix: str) -> None:
    with file_of(content, f"chats{suffix}") as file:
        chats = read_or_refused(lambda: list(read_conversations(str(file), split="train", counts=Counts())))
    assert chats is None or all(chats)


RECIPE = b"target:\n  model: tiny\nheads:\n  num_heads: 3\ntrain:\n  epochs: 2\n  learning_rate: 1e-3\nseed: 1\n"


@given(damaged(RECIPE, {"target": {"model": "tiny"}}), st.lists(st.text(max_size=20), max_size=2))
@example(b"a: &a [*a]", [])
def test_a_recipe_is_read_or_refused(content: bytes, overrides: list[str]) -> None:
    with file_of(content, "recipe.yaml") as file:
        read_or_refused(lambda: load_recipe(file, overrides))
