"""What has been said so far, and its file: a line of JSON that training and `--prompts` read too."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from medusa_cli.cli.console import write_result
from medusa_cli.data.conversations import Counts, Message, read_conversations
from medusa_cli.errors import DataError
from medusa_cli.util.paths import expanded


@dataclass
class Talk:
    """A conversation.

    turns        questions and replies, in pairs
    unanswered   the last question, where it got no reply
    file         where it was saved last, or read from
    """

    system: str | None = None
    turns: list[Message] = field(default_factory=list)
    unanswered: str | None = None
    file: Path | None = None

    def messages(self, question: str | None = None) -> list[Message]:
        """All that was said, and then this question."""
        first = [Message("system", self.system)] if self.system else []
        last = [] if question is None else [Message("user", question)]
        return [*first, *self.turns, *last]

    def add(self, question: str, reply: str) -> None:
        """A question got its reply."""
        self.turns += [Message("user", question), Message("assistant", reply)]
        self.unanswered = None

    def take_back(self) -> str | None:
        """The last question, to ask it again: the reply that it got is forgotten. None where nothing was asked."""
        if self.unanswered is None and self.turns:
            question, _ = self.turns[-2:]
            del self.turns[-2:]
            self.unanswered = question.content
        return self.unanswered

    def reset(self) -> None:
        """Forget what was said. The system message stays."""
        self.turns, self.unanswered, self.file = [], None, None

    def save(self, name: str, *, over: bool) -> Path:
        """Write it to a file. Raises DataError for nothing to write, and for a file that holds something else.

        over   whatever the file holds
        """
        file = expanded(name).absolute()
        if not self.turns:
            raise DataError("there is nothing to save yet", "ask something first")
        if file.suffix != ".jsonl":
            raise DataError(f"{name} is no .jsonl file", "that is what --prompts, --dataset and /load read")
        if file.exists() and file != self.file and not over:
            raise DataError(f"{name} is there already", f"/save! {name} writes over it")
        row = {"messages": [{"role": one.role, "content": one.content} for one in self.messages()]}
        write_result(file, (json.dumps(row, ensure_ascii=False) + "\n").encode())
        self.file = file
        return file

    def load(self, name: str) -> None:
        """Take up the conversation in a file. Raises DataError where that is none, or several; then nothing changes."""
        file = expanded(name).absolute()
        if not file.exists():
            raise DataError(f"no such file: {name}", f"looked in {file.parent}")
        found = list(read_conversations(str(file), split="train", counts=Counts(), on_bad_row="fail"))
        if len(found) > 1:
            raise DataError(f"{name} holds {len(found)} conversations", "/load takes a file with one")
        messages = [Message(one.role, one.content) for one in found[0].messages]
        if messages[0].role == "text":
            raise DataError(f"{name} holds a plain text and no conversation", "rows need messages with roles")
        self.system = messages.pop(0).content if messages[0].role == "system" else None
        self.unanswered = messages.pop().content if messages[-1].role == "user" else None
        self.turns, self.file = messages, file
