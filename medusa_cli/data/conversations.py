"""Rows of any common layout as conversations. This file knows no tokenizer.

A row's layout is told from its keys, in this order:
messages       [{role, content}]; weight 0 or train false on an answer: it is not learnt
conversations  [{from, value}], as ShareGPT writes it (either key takes either spelling)
turns          [text], prompts only: the first is the prompt, as later ones need the answers between
instruction    with input and output (Alpaca)
prompt         with response or completion; question with answer
text           plain text, no roles
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from medusa_cli.data.rows import Broken, Row, read_rows
from medusa_cli.errors import DataError

OnBadRow = Literal["skip", "fail"]
_ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant",
}  # fmt: skip
_LAYOUTS_HINT = "a row needs messages, conversations, turns, instruction/output, prompt/response or text"


@dataclass(frozen=True)
class Message:
    """One turn. `role` is system, user, assistant, or text for plain text without roles.

    learnt   false for an answer that its row says is not to be learnt
    """

    role: str
    content: str
    learnt: bool = True


@dataclass(frozen=True)
class Conversation:
    """Messages in order.

    row         the row they came from, counted from 1, or None when they came from no file
    only_last   only the last answer is learnt: those before it are another's words
    unfinished  the last answer was cut off by a limit, so that its end is nothing to learn
    """

    messages: list[Message]
    id: str
    row: int | None = None
    only_last: bool = False
    unfinished: bool = False

    @property
    def place(self) -> str:
        """Where it came from, for messages to the user."""
        return f"conversation {self.id}" if self.row is None else f"row {self.row}"


class BadRow(DataError):
    """One row can't be used: `reason` in words, and the `field` at fault."""

    def __init__(self, reason: str, field: str, place: str = "a row", hint: str = "correct or remove it") -> None:
        super().__init__(f"{place}, field {field}: {reason}", hint)
        self.reason = reason
        self.field = field

    def at(self, place: str) -> "BadRow":
        """The same fault, with the place where it was found."""
        return BadRow(self.reason, self.field, place, self.hint)


@dataclass
class Counts:
    """What became of the rows, from file to ids. One object is handed along and filled in.

    read      rows read
    skipped   rows left out, by reason; `first` says where each reason was first met
    cut       samples shortened to the longest length allowed, and still used
    empty     samples left out because no answer token was left to learn (also in `skipped`)
    used      samples made
    plain     samples made without a chat template, where all text is learnt
    tokens    tokens of the samples made; `supervised` of them are learnt
    """

    read: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    cut: int = 0
    empty: int = 0
    used: int = 0
    plain: int = 0
    tokens: int = 0
    supervised: int = 0

    def skip(self, reason: str, place: str) -> None:
        """Count one row left out."""
        self.skipped[reason] += 1
        self.first.setdefault(reason, place)

    @property
    def reasons(self) -> str:
        """Why rows were left out, the most frequent reason first."""
        return "; ".join(f"{number} {why} (first: {self.first[why]})" for why, number in self.skipped.most_common())

    def numbers(self) -> dict[str, int]:
        """What a run records of its rows."""
        return {
            "rows read": self.read,
            "rows left out": self.skipped.total(),
            "rows without an answer to learn": self.empty,
            "rows shortened": self.cut,
        }

    def describe(self) -> str:
        """One line for the user."""
        left_out = f", {self.skipped.total()} left out: {self.reasons}" if self.skipped else ""
        shortened = f", {self.cut} shortened" if self.cut else ""
        return f"{self.read} rows read{shortened}{left_out}"


def read_conversations(
    source: str,
    *,
    split: str,
    counts: Counts,
    on_bad_row: OnBadRow = "skip",
    config: str | None = None,
    streaming: bool = False,
) -> Iterator[Conversation]:
    """The conversations in a file or hub data set; `split`, `config` and `streaming` are for the latter.

    A row that can't be used is counted in `counts` with its reason, or raises BadRow with `on_bad_row="fail"`.
    Raises DataError when the source can't be read (see `read_rows`) or holds no usable row.
    """
    return _usable(read_rows(source, split, config=config, streaming=streaming), source, counts, on_bad_row)


def _usable(rows: Iterator[Row], source: str, counts: Counts, on_bad_row: OnBadRow) -> Iterator[Conversation]:
    """The rows that are conversations; DataError at the end when none was."""
    usable = 0
    for row in rows:
        counts.read += 1
        if isinstance(row.value, Broken):
            if on_bad_row == "fail":
                raise row.value.error
            counts.skip("broken JSON", f"line {row.number}")
            continue
        try:
            messages = messages_of(row.value)
            check_order(messages)
        except BadRow as fault:
            if on_bad_row == "fail":
                raise fault.at(f"{source}, row {row.number}") from fault
            counts.skip(fault.reason, f"row {row.number}, field {fault.field}")
            continue
        usable += 1
        own = row.value.get("id")
        yield Conversation(messages, f"row {row.number}" if own is None else str(own), row.number)
    if not usable:
        raise DataError(f"{source}: 0 usable rows; {counts.describe()}", _LAYOUTS_HINT)


def messages_of(row: Any) -> list[Message]:
    """The messages of one row, whatever its layout; BadRow when a field is missing or not what it should be."""
    if not isinstance(row, Mapping):
        raise BadRow(f"a row must be an object, not {type(row).__name__}", "(the row)", hint=_LAYOUTS_HINT)
    for key, layout in _LAYOUTS.items():
        if row.get(key) is not None:
            return layout(row)
    raise BadRow("none of the known fields is there", ", ".join(map(str, row)) or "(none)", hint=_LAYOUTS_HINT)


def check_order(messages: list[Message]) -> None:
    """Raise BadRow unless the system comes first, if at all, and user and assistant take turns, the user first."""
    turns = messages[1:] if messages[0].role == "system" else messages
    start = len(messages) - len(turns)
    if not turns:
        raise BadRow("a system message and nothing else", "messages")
    for index, message in enumerate(turns):
        place = f"messages[{start + index}]"
        if message.role == "system":
            raise BadRow("a system message after the first place", place)
        if index and message.role == turns[index - 1].role:
            raise BadRow(f"two messages in a row from the {message.role}", place)
        if message.role == "user" and not message.content.strip():
            raise BadRow("an empty user message", place)
    if turns[0].role == "assistant":
        raise BadRow("the assistant speaks first", f"messages[{start}]")


def _text(value: Any, name: str) -> str:
    """A text field; lists of {type: text} parts are joined."""
    if isinstance(value, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in value):
        value = "".join(_text(part.get("text"), f"{name}.text") for part in value)
    if not isinstance(value, str):
        raise BadRow(f"text expected, found {type(value).__name__}", name)
    if not is_text(value):
        raise BadRow("holds half of a surrogate pair, which is no character", name)
    return value


def is_text(value: str) -> bool:
    """False for halves of surrogate pairs, which no tokenizer takes: bytes of a command line that are not UTF-8."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _filled(row: Mapping[str, Any], *names: str) -> tuple[str, str] | None:
    """The first of these fields that is there, as name and text."""
    for name in names:
        if row.get(name) is not None:
            return name, _text(row[name], name)
    return None


def _turns(name: str) -> Callable[[Mapping[str, Any]], list[Message]]:
    """The layout that lists its turns under `name`."""

    def layout(row: Mapping[str, Any]) -> list[Message]:
        entries = row[name]
        if not isinstance(entries, list) or not entries:
            raise BadRow("a list with at least one turn expected", name)
        return [_turn(entry, f"{name}[{index}]") for index, entry in enumerate(entries)]

    return layout


def _turn(entry: Any, name: str) -> Message:
    """One {role, content} or {from, value}."""
    if not isinstance(entry, Mapping):
        raise BadRow(f"an object expected, found {type(entry).__name__}", name)
    role_key = "from" if "from" in entry else "role"
    content_key = "value" if "value" in entry else "content"
    role = _text(entry.get(role_key), f"{name}.{role_key}").strip().lower()
    if role not in _ROLES:
        raise BadRow(f"unknown role '{role}'", f"{name}.{role_key}", hint=f"roles are {', '.join(_ROLES)}")
    content = _text(entry.get(content_key), f"{name}.{content_key}")
    return Message(_ROLES[role], content, _is_learnt(entry, name) or _ROLES[role] != "assistant")


def _is_learnt(entry: Mapping[str, Any], name: str) -> bool:
    """What `weight` (0 or 1) and `train` say, where they are there."""
    weight, train = entry.get("weight"), entry.get("train")
    if weight is not None and (isinstance(weight, str) or weight not in (0, 1)):
        raise BadRow("a weight other than 0 and 1, which is not followed", f"{name}.weight")
    if train is not None and not isinstance(train, bool):
        raise BadRow(f"true or false expected, found {type(train).__name__}", f"{name}.train")
    return weight != 0 and train is not False


def _prompts_only(row: Mapping[str, Any]) -> list[Message]:
    """`turns`: what the user says, without answers."""
    turns = row["turns"]
    if not isinstance(turns, list) or not turns:
        raise BadRow("a list with at least one text expected", "turns")
    return [Message("user", _text(turns[0], "turns[0]"))]


def _pair(prompt: str, *answers: str) -> Callable[[Mapping[str, Any]], list[Message]]:
    """The layout of one question and, perhaps, its answer."""

    def layout(row: Mapping[str, Any]) -> list[Message]:
        asked = _text(row[prompt], prompt)
        if prompt == "instruction" and (given := _filled(row, "input")) and given[1].strip():
            asked = f"{asked}\n\n{given[1]}"
        messages = [Message("user", asked)]
        if system := _filled(row, "system"):
            messages.insert(0, Message("system", system[1]))
        if answer := _filled(row, *answers):
            messages.append(Message("assistant", answer[1]))
        return messages

    return layout


def _plain(row: Mapping[str, Any]) -> list[Message]:
    """`text`: no roles."""
    content = _text(row["text"], "text")
    if not content.strip():
        raise BadRow("an empty text", "text")
    return [Message("text", content)]


_LAYOUTS: dict[str, Callable[[Mapping[str, Any]], list[Message]]] = {
    "messages": _turns("messages"),
    "conversations": _turns("conversations"),
    "turns": _prompts_only,
    "instruction": _pair("instruction", "output", "response"),
    "prompt": _pair("prompt", "response", "completion"),
    "question": _pair("question", "answer"),
    "text": _plain,
}
