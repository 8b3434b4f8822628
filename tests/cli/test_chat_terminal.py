"""`medusa chat` at a terminal: Ctrl-C, Ctrl-D, pastes, the history, and lines that end between words."""

import errno
import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.cli.chatting.flow import Flow
from medusa_cli.cli.chatting.here import Here
from medusa_cli.cli.chatting.history import MOST_CHARACTERS, MOST_TURNS, History
from medusa_cli.cli.chatting.loop import shown
from medusa_cli.cli.chatting.reply import Manner, Reply
from medusa_cli.cli.console import Console
from medusa_cli.cli.signals import at_ctrl_c, interrupt
from medusa_cli.cli.wishes import ChoosingFlags, EndingFlags
from medusa_cli.data.conversations import Message
from medusa_cli.decode.loop import Parts
from medusa_cli.drafters.none import NoDrafter
from tests.chat_server import chat_server
from tests.cli.harness import ENOUGH, ROOT, make_model
from tests.cli.test_chat_url import events, piece
from tests.tiny_folders import CHAT_TEMPLATE, tiny_tokenizer
from tests.tiny_models import target_of, tiny_model

CTRL_C, CTRL_D, UP, ENTER = "\x03", "\x04", "\x1b[A", "\r"


class Terminal:
    """The program at a terminal of its own, and what that has shown."""

    def __init__(self, *args: object, **environment: str) -> None:
        self._master, slave = pty.openpty()
        self.screen, self._seen = "", 0
        self.process = subprocess.Popen(
            [sys.executable, "-m", "medusa_cli", "chat", *map(str, args)],
            stdin=slave, stdout=slave, stderr=slave, cwd=ROOT, start_new_session=True,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "80", "NO_COLOR": "1"} | environment,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, wanted: str) -> str:
        """Wait until this shows, after what was waited for before; what has shown up to it."""
        ends = time.monotonic() + ENOUGH
        while wanted not in self.screen[self._seen :]:
            assert self._read(ends), f"{wanted!r} didn't show:\n{self.screen}"
        begun, self._seen = self._seen, self.screen.index(wanted, self._seen) + len(wanted)
        return self.screen[begun : self._seen]

    def press_until(self, key: str, wanted: str) -> None:
        """Press a key until this shows: Python's line reader doesn't see a signal that comes just before it waits."""
        ends = time.monotonic() + ENOUGH
        while wanted not in self.screen[self._seen :]:
            assert time.monotonic() < ends, f"{wanted!r} didn't show:\n{self.screen}"
            self.type(key)
            pause = time.monotonic() + 0.5
            while self._read(pause):
                pass
        self.until(wanted)

    def until_it_writes(self) -> None:
        """Wait until there is something of a reply, after the line that was entered."""
        self.until("\n")
        ends = time.monotonic() + ENOUGH
        while not any(each.isalnum() for each in self.screen[self._seen :].replace("[?2004l", "")):
            assert self._read(ends), f"no reply:\n{self.screen}"

    def ended(self) -> int:
        """Its exit code, once it has ended."""
        ends = time.monotonic() + ENOUGH
        while self._read(ends):
            pass
        return self.process.wait(ENOUGH)

    def _read(self, ends: float) -> bool:
        """Take what has come; False at the end, or where nothing comes in time."""
        if not select.select([self._master], [], [], max(0.0, ends - time.monotonic()))[0]:
            return False
        try:
            found = os.read(self._master, 65536)
        except OSError as error:
            if error.errno != errno.EIO:  # the other side is closed
                raise
            return False
        self.screen += found.decode(errors="replace")
        return bool(found)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """Opens terminals; none outlives the test."""
    opened: list[Terminal] = []

    def begin(*args: object, **environment: str) -> Terminal:
        opened.append(Terminal(*args, **environment))
        return opened[-1]

    yield begin
    for each in opened:
        each.close()


def test_ctrl_c_stops_a_reply_and_ctrl_d_the_program(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", positions=8192)
    out = tmp_path / "out.json"
    # enough to write for a minute
    flags = ("--ignore-eos", "-n", 8000, "--drafter", "none", "--dtype", "float32", "--runner", "eager")
    at = terminal("-m", model, *flags, "--output-json", out, "--no-history")
    at.until("/help lists commands, Ctrl-D leaves")
    at.until("> ")
    at.press_until(CTRL_C, "Ctrl-D or /exit leaves")
    at.until("> ")
    at.type(f"the sea{ENTER}")
    at.until("the sea")
    at.until_it_writes()
    at.type(CTRL_C)
    at.until("stopped, the part stays")
    at.until("> ")
    at.type(f"/resett{ENTER}")
    at.until("did you mean /reset?")
    at.until("> ")
    at.type(f"/set max-new-tokens 300{ENTER}")
    at.until("from the next reply on")
    at.type(f"it is{ENTER}")
    at.until("it is")
    at.until_it_writes()
    at.type(CTRL_D)  # typed ahead: it counts once the reply has ended
    assert at.ended() == 0
    assert "Traceback" not in at.screen
    document = json.loads(out.read_text())
    assert [one["finish_reason"] for one in document["replies"]] == ["interrupted", "length"]
    said = [one["content"] for one in document["messages"]]
    assert said == ["the sea", document["replies"][0]["text"], "it is", document["replies"][1]["text"]]
    assert 1 < document["replies"][0]["completion_tokens"] < 8000


def test_a_second_ctrl_c_does_not_wait_and_the_next_reply_is_as_ever() -> None:
    target = target_of(tiny_model("llama"), tokenizer=tiny_tokenizer(CHAT_TEMPLATE))
    manner = Manner(EndingFlags(max_new_tokens=20, ignore_eos=True), ChoosingFlags(), 0)
    with Here(Parts(target, NoDrafter(), Greedy()), (), Console(quiet=True)) as here:
        asked = [Message("user", "w5 w6")]
        whole = "".join(here.write(asked, manner, Reply(0)))
        writing = here.write(asked, manner, Reply(1))
        begun = [next(writing) for _ in range(4)]
        with at_ctrl_c(here.stop, interrupt):
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)  # and a third changes nothing
        with pytest.raises(KeyboardInterrupt):
            writing.throw(KeyboardInterrupt)
        reply = Reply(2)
        assert "".join(here.write(asked, manner, reply)) == whole
        assert whole.startswith("".join(begun))
        assert (reply.completion_tokens, reply.num_steps, reply.finish_reason) == (20, 19, "length")


def test_a_reply_that_is_stopped_ends_between_steps() -> None:
    target = target_of(tiny_model("llama"), tokenizer=tiny_tokenizer(CHAT_TEMPLATE))
    manner = Manner(EndingFlags(max_new_tokens=20, ignore_eos=True), ChoosingFlags(), 0)
    with Here(Parts(target, NoDrafter(), Greedy()), (), Console(quiet=True)) as here:
        reply = Reply(0)
        for place, _ in enumerate(here.write([Message("user", "w5 w6")], manner, reply)):
            if place == 5:
                here.stop()
        assert reply.finish_reason == "interrupted"
        assert reply.completion_tokens == 6


@contextmanager
def slow_server() -> Iterator[tuple[str, threading.Event]]:
    """A server that sends a word and then nothing; the event is set when its client has left."""
    left, ends = threading.Event(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(events(piece("Slowly it"), done=False).content)
            self.wfile.flush()
            while not ends.is_set():
                if select.select([self.connection], [], [], 0.05)[0] and not self.connection.recv(1):
                    left.set()
                    return

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", left
    finally:
        ends.set()
        server.shutdown()
        server.server_close()


def test_ctrl_c_leaves_a_server_that_is_still_writing(terminal: Callable[..., Terminal]) -> None:
    with slow_server() as (url, left):
        at = terminal("--url", url, "-m", "slow", "--no-history")
        at.until("> ")
        at.type(f"Hello{ENTER}")
        at.until("Slowly")
        at.type(CTRL_C)
        at.until("stopped, the part stays")
        assert left.wait(ENOUGH)
        at.until("> ")
        at.type(f"/exit{ENTER}")
        assert at.ended() == 0


def test_after_a_failure_the_question_can_be_asked_again(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    answers = iter([events({"error": {"message": "a step broke off"}}), events(piece("Yes."), piece(None, "stop"))])
    out = tmp_path / "out.json"
    with chat_server(lambda _: next(answers)) as heard:
        at = terminal("--url", heard.url, "--output-json", out, "--no-history")
        at.until("> ")
        at.type(f"Is it?{ENTER}")
        at.until("error: the server at ")
        at.until(" hint: what was said before is kept; /retry asks again")
        at.type(f"/retry{ENTER}")
        at.until("Yes.")
        at.until("> ")
        at.type(CTRL_D)
        assert at.ended() == 0
    assert [one["content"] for one in json.loads(out.read_text())["messages"]] == ["Is it?", "Yes."]


def test_what_was_typed_comes_back_in_the_next_conversation(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(0o700)
    with chat_server(lambda body: events(piece(body["messages"][-1]["content"].upper()), piece(None, "stop"))) as heard:
        at = terminal("--url", heard.url, MEDUSA_HOME=str(home))
        at.until("> ")
        at.type("\x1b[200~first line\nsecond line\x1b[201~")
        at.until("second line")
        at.type(ENTER)
        at.until("SECOND LINE")
        at.until("> ")
        at.type(CTRL_D)
        assert at.ended() == 0
        again = terminal("--url", heard.url, MEDUSA_HOME=str(home))
        again.until("> ")
        again.type(UP)
        again.until("second line")
        again.type(ENTER)
        again.until("SECOND LINE")
        again.until("> ")
        again.type("/sta\t\r")
        again.until("replies 1")
        again.until("> ")
        again.type(CTRL_D)
        assert again.ended() == 0
    assert [body["messages"][0]["content"] for body in heard.bodies] == ["first line\nsecond line"] * 2
    (file,) = (home / "chat").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert [json.loads(line) for line in file.open()] == ["first line\nsecond line"] * 2 + ["/stats"]


def test_a_document_on_stdout_has_no_room_beside_a_conversation(terminal: Callable[..., Terminal]) -> None:
    at = terminal("--json")
    assert at.ended() == 2
    assert "pipe the turns in" in at.screen


def test_the_history_is_bounded_and_outlives_damage(tmp_path: Path) -> None:
    file = tmp_path / "chat" / "history.jsonl"
    history = History(file)
    assert history.read() == []
    history.add("one\ntwo")
    history.add("x" * (MOST_CHARACTERS + 1))
    assert history.read() == ["one\ntwo"]
    assert file.parent.stat().st_mode & 0o777 == 0o700
    with file.open("a") as out:
        out.write('{"no": "turn"}\nno json\n[\n"whole"\n')
    assert history.read() == ["one\ntwo", "whole"]
    with file.open("a") as out:
        out.writelines(f'"{number}"\n' for number in range(2 * MOST_TURNS))
    kept = history.read()
    assert (len(kept), kept[-1]) == (MOST_TURNS, str(2 * MOST_TURNS - 1))
    assert len(file.read_text().splitlines()) == MOST_TURNS
    assert file.stat().st_mode & 0o777 == 0o600


def flowed(pieces: list[str], width: int | None) -> str:
    flow = Flow(lambda: width)
    return "".join(flow.feed(each) for each in pieces) + flow.flush()


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three four", ["one two", "three four"]),
        ("one two\nthree", ["one two", "three"]),
        ("ten chars. and more", ["ten chars.", "and more"]),
        ("    so it is", ["    so it", "is"]),
        # what is longer than a line is the terminal's to break
        ("    indented text", ["    indented text"]),
        ("a bcdefghijklmnopqrst uv", ["a", "bcdefghijklmnopqrst", "uv"]),
        ("日本語日本語日本語", ["日本語日本語日本語"]),
        ("", [""]),
    ],
)
def test_lines_end_between_words_however_the_text_arrives(text: str, lines: list[str]) -> None:
    for size in (1, 2, 3, 50):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert flowed(pieces, 10).split("\n") == lines
        assert flowed(pieces, None) == text


def test_a_reply_can_not_drive_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a\tb\n\x1b[2J\x9b1m\r é 👩‍🚀"
    assert shown(text) == text
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda stream: True)
    assert shown(text) == "a\tb\n\\x1b[2J\\x9b1m\\r é 👩‍🚀"
