"""Any common layout is read; whatever can't be is named with its row, field and reason."""

import json
from pathlib import Path
from typing import Any

import pytest

from medusa_cli.data.conversations import BadRow, Conversation, Counts, Message, read_conversations
from medusa_cli.data.user_turns import asked_turns
from medusa_cli.errors import DataError

ASKED = [Message("user", "Hi"), Message("assistant", "Hello")]
ROLES = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}


def jsonl(folder: Path, *rows: Any) -> str:
    """A file with these rows."""
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def read(source: str, counts: Counts | None = None, **options: Any) -> list[Conversation]:
    return list(read_conversations(source, split="train", counts=counts or Counts(), **options))


@pytest.mark.parametrize(
    "row",
    [
        ROLES,
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"conversations": [{"from": "user", "value": "Hi"}, {"from": "assistant", "value": "Hello"}]},
        {"messages": [{"role": "human", "content": "Hi"}, {"role": "gpt", "content": "Hello"}]},
        {"messages": [{"role": "User", "content": [{"type": "text", "text": "Hi"}]}, ROLES["messages"][1]]},
        {"prompt": "Hi", "response": "Hello"},
        {"prompt": "Hi", "completion": "Hello"},
        {"instruction": "Hi", "input": "", "output": "Hello", "text": "all of it"},
        {"question": "Hi", "answer": "Hello"},
        {"prompt": "other", **ROLES},
    ],
)
def test_every_layout_gives_the_same_messages(tmp_path: Path, row: dict) -> None:
    assert read(jsonl(tmp_path, row))[0].messages == ASKED


@pytest.mark.parametrize(
    ("said", "wanted"),
    [({"weight": 0}, False), ({"weight": 1.0}, True), ({"train": False}, False), ({"train": True}, True), ({}, True)],
)
def test_a_turn_says_whether_it_is_learnt(tmp_path: Path, said: dict, wanted: bool) -> None:
    for asked, answered in (({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}),
                            ({"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"})):  # fmt: skip
        [row] = read(jsonl(tmp_path, {"messages": [asked | said, answered | said]}))
        assert [message.learnt for message in row.messages] == [True, wanted], "what a user says is never learnt"


@pytest.mark.parametrize(
    ("said", "field"), [({"weight": 0.5}, "weight"), ({"weight": "0"}, "weight"), ({"train": 0}, "train")]
)
def test_a_wish_about_learning_that_can_t_be_followed_is_a_bad_row(tmp_path: Path, said: dict, field: str) -> None:
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo", **said}]}
    with pytest.raises(BadRow, match=rf"messages\[1\].{field}"):
        read(jsonl(tmp_path, row), on_bad_row="fail")


def test_a_turn_whose_answer_is_not_to_be_learnt_is_not_asked() -> None:
    turns = [
        Message("user", "a"),
        Message("assistant", "b", learnt=False),
        Message("user", "c"),
        Message("assistant", "d"),
    ]
    asked = asked_turns([Conversation(turns, "x", 1), Conversation(turns[:1], "y", 2)], most=9)
    assert list(asked.values()) == [turns[:3], turns[:1]]


def test_a_system_message_comes_first(tmp_path: Path) -> None:
    turns = [{"from": "system", "value": "Be brief"}, {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]
    [conversation] = read(jsonl(tmp_path, {"id": "x1", "conversations": turns}))
    assert [message.role for message in conversation.messages] == ["system", "user", "assistant"]
    assert (conversation.id, conversation.row) == ("x1", 1)


def test_prompts_inputs_and_plain_text_are_understood(tmp_path: Path) -> None:
    rows = [{"turns": ["One", "Two"]}, {"instruction": "Add", "input": "1 2", "output": "3"}, {"text": "Once"}]
    turns, added, plain = read(jsonl(tmp_path, *rows))
    assert turns.messages == [Message("user", "One")]
    assert added.messages[0].content == "Add\n\n1 2"
    assert plain.messages == [Message("text", "Once")]


@pytest.mark.parametrize(
    ("row", "field", "reason"),
    [
        ({"messages": [{"role": "user", "content": "a"}] * 2}, "messages[1]", "two messages in a row from the user"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "messages[0]", "the assistant speaks first"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages", "a system message and nothing else"),
        ({"messages": [*ROLES["messages"], {"role": "system", "content": "a"}]}, "messages[2]", "after the first"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role", "unknown role 'tool'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "text expected, found NoneType"),
        ({"messages": [{"content": "a"}]}, "messages[0].role", "text expected, found NoneType"),
        ({"messages": [{"role": "user", "content": " "}]}, "messages[0]", "an empty user message"),
        ({"messages": []}, "messages", "at least one turn expected"),
        ({"messages": "Hi"}, "messages", "at least one turn expected"),
        ({"messages": ["Hi"]}, "messages[0]", "an object expected, found str"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content", "text expected"),
        ({"prompt": 3}, "prompt", "text expected, found int"),
        ({"turns": [3]}, "turns[0]", "text expected, found int"),
        ({"text": ""}, "text", "an empty text"),
        ({"body": "Hi"}, "body", "none of the known fields"),
        ({}, "(none)", "none of the known fields"),
        ("Hi", "(the row)", "a row must be an object, not str"),
    ],
)
def test_a_bad_row_is_named_with_field_and_reason(tmp_path: Path, row: Any, field: str, reason: str) -> None:
    source = jsonl(tmp_path, ROLES, row)
    with pytest.raises(BadRow) as caught:
        read(source, on_bad_row="fail")
    assert caught.value.message.startswith(f"{source}, row 2, field {field}: ")
    assert reason in caught.value.message

    counts = Counts()
    assert len(read(source, counts)) == 1
    assert counts.read == 2
    assert counts.skipped.total() == 1
    assert reason in counts.describe()
    assert "first: row 2" in counts.describe()


def test_half_a_surrogate_pair_is_a_bad_row_not_a_crash(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "\\ud83d"}\n{"text": "\\ud83d\\ude00"}\n', encoding="utf-8")
    counts = Counts()
    assert [c.messages[0].content for c in read(str(file), counts)] == ["😀"]
    assert "surrogate" in counts.describe()


def test_zero_usable_rows_is_an_error_with_the_counts(tmp_path: Path) -> None:
    named = r"0 usable rows; 2 rows read, 2 left out: 2 none of the known fields is there \(first: row 1, field a, c\)"
    with pytest.raises(DataError, match=named) as caught:
        read(jsonl(tmp_path, {"a": 1, "c": 2}, {"b": 2}))
    assert "a row needs messages, conversations" in caught.value.hint


def test_rows_are_numbered_by_line_so_blank_lines_count(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b"}\r\n')
    assert [conversation.row for conversation in read(str(file))] == [1, 3]


def test_a_json_list_a_parquet_file_and_a_text_file_are_read(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    listed = tmp_path / "data.json"
    listed.write_text(json.dumps([ROLES, {"prompt": "Hi", "response": "Hello"}], indent=1))
    assert [c.messages for c in read(str(listed))] == [ASKED, ASKED]
    table = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROLES, ROLES]), table)
    assert [(c.messages, c.row) for c in read(str(table))] == [(ASKED, 1), (ASKED, 2)]
    text = tmp_path / "data.TXT"
    text.write_text("One\n\nTwo\n")
    assert [c.messages[0] for c in read(str(text))] == [Message("text", "One"), Message("text", "Two")]


def test_json_lines_in_a_json_file_are_read(tmp_path: Path) -> None:
    file = tmp_path / "data.json"
    file.write_text(json.dumps(ROLES) + "\n" + json.dumps(ROLES) + "\n")
    assert len(read(str(file))) == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "line 2: broken JSON"),
        ("a.jsonl", b"[" * 100_000, "line 1: broken JSON"),
        ("a.json", b'[{"text": "a"},\n\n{"text": ]', "line 3: broken JSON"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff\xfe"}\n', "line 2: is not UTF-8"),
        ("a.txt", '{"text": "a"}'.encode("utf-16"), "line 1: is not UTF-8"),
        ("a.txt", b"a\n\x00\x01\x02\n", "line 2: holds a zero byte"),
        ("a.jsonl", bytes(range(1, 256)), "line 1: broken JSON"),
        ("a.jsonl", b"", "0 usable rows; 0 rows read"),
        ("a.json", b" \n", "0 usable rows; 0 rows read"),
        ("a.parquet", b"", "as parquet"),
        ("a.parquet", b"PAR1 junk", "as parquet"),
        ("a.csv", b"a,b", "can't tell its format from '.csv'"),
    ],
)
def test_a_broken_file_is_named_and_so_is_the_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read(str(file), on_bad_row="fail")
    assert name in caught.value.message
    assert message in caught.value.message
    assert caught.value.hint


def test_a_line_that_is_no_json_is_a_bad_row_and_the_others_are_read(tmp_path: Path) -> None:
    file, counts = tmp_path / "a.jsonl", Counts()
    file.write_text('{"text": "a"}\n{"text": \n{"text": "b"}\n')
    found = list(read_conversations(str(file), split="train", counts=counts, on_bad_row="skip"))
    assert [(one.messages[0].content, one.row) for one in found] == [("a", 1), ("b", 3)]
    assert counts.describe() == "3 rows read, 1 left out: 1 broken JSON (first: line 2)"


@pytest.mark.parametrize("source", ["missing.jsonl", "some/where/else/data", "./data", "~/no such file"])
def test_a_missing_file_is_an_error_before_any_row_is_asked_for(source: str) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_conversations(source, split="train", counts=Counts())


def test_a_folder_is_no_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a folder"):
        read(str(tmp_path))


def test_an_unreadable_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("{}")

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match="can't read .*Permission denied"):
        read(str(file))


def test_a_data_set_on_the_hub_is_read_by_name_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: dict[str, Any] = {}

    def load(path: str, **options: Any) -> Any:
        asked.update(path=path, **options)
        return datasets.Dataset.from_list([ROLES])

    monkeypatch.setattr(datasets, "load_dataset", load)
    conversations = list(read_conversations("org/chats", split="train_sft", counts=Counts(), config="main"))
    assert [c.messages for c in conversations] == [ASKED]
    assert asked == {"path": "org/chats", "split": "train_sft", "name": "main", "streaming": False}


def test_a_streamed_data_set_is_read_only_as_far_as_rows_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    load, taken = datasets.load_dataset, []
    file = jsonl(tmp_path, *({"text": f"text {n}"} for n in range(50)))

    def from_file(path: str, *, name: str | None, split: str, streaming: bool) -> Any:
        rows = load("json", data_files=file, split=split, streaming=streaming)
        assert isinstance(rows, datasets.IterableDataset)
        return (taken.append(row) or row for row in rows)

    monkeypatch.setattr(datasets, "load_dataset", from_file)
    rows = read_conversations("org/texts", split="train", counts=Counts(), streaming=True)
    assert [next(rows).messages[0].content for _ in range(3)] == ["text 0", "text 1", "text 2"]
    assert len(taken) == 3


def test_a_stream_that_breaks_off_names_the_data_set_and_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def rows() -> Any:
        yield ROLES
        raise ConnectionError("Server disconnected\nlong trace")

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows())
    with pytest.raises(DataError, match="data set 'org/chats' breaks off after row 1: Server disconnected$"):
        read("org/chats", streaming=True)


@pytest.mark.parametrize("error", [RuntimeError("Dataset scripts are no longer supported"), "DatasetGenerationError"])
def test_a_data_set_that_the_library_can_not_build_is_an_error(
    monkeypatch: pytest.MonkeyPatch, error: Exception | str
) -> None:
    import datasets

    raised = error if isinstance(error, Exception) else getattr(datasets.exceptions, error)("An error occurred")

    def load(*_: Any, **__: Any) -> Any:
        raise raised

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DataError, match="can't load data set 'org/chats'") as caught:
        read("org/chats")
    assert "data.dataset_config" in caught.value.hint


@pytest.mark.parametrize(
    "error", [ConnectionError("Couldn't reach the Hub\nlong trace"), ValueError('Unknown split "x"')]
)
def test_a_hub_that_cannot_be_reached_is_an_error_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    import datasets

    def load(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DataError) as caught:
        read("org/chats")
    assert str(error).splitlines()[0] in caught.value.message
    assert "\n" not in caught.value.message
    assert "local file" in caught.value.hint
