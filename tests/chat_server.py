"""A real HTTP server on this machine that speaks chat completions, or misbehaves in the way a test wants."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]


@dataclass(frozen=True)
class Says:
    """What the server sends: a document as JSON, or bytes as they are."""

    content: Any
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Heard:
    """What has reached the server: paths, bodies, and the headers of the last request; most requests at once."""

    url: str = ""
    paths: list[str] = field(default_factory=list)
    bodies: list[Body] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    at_once: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def asked(self) -> list[str]:
        """The last message of each request."""
        return [body["messages"][-1]["content"] for body in self.bodies]


def completion(text: str | None, finish_reason: str = "stop", **more: Any) -> Says:
    """An answer as OpenAI's API gives it."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    return Says({"object": "chat.completion", "model": "big", "choices": [choice], **more})


Answer = Callable[[Body], Says]


@contextmanager
def chat_server(answer: Answer, models: tuple[str, ...] = ("big",)) -> Iterator[Heard]:
    """A server at `heard.url` that serves these models, and `answer(body)` to whoever asks."""
    heard = Heard()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._note()
            self._say(Says({"object": "list", "data": [{"id": model} for model in models]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with heard.lock:
                heard.bodies.append(body)
                heard.at_once += 1
                heard.most_at_once = max(heard.most_at_once, heard.at_once)
            self._note()
            try:
                self._say(answer(body))
            finally:
                with heard.lock:
                    heard.at_once -= 1

        def _note(self) -> None:
            with heard.lock:
                heard.paths.append(self.path)
                heard.keys.add(self.headers.get("Authorization"))

        def _say(self, says: Says) -> None:
            content = says.content if isinstance(says.content, bytes) else json.dumps(says.content).encode()
            try:
                self.send_response(says.status)
                for name, value in {"Content-Length": str(len(content)), **says.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)
            except (BrokenPipeError, ConnectionResetError):
                pass  # a client that waited long enough

        def log_message(self, *_: Any) -> None:
            """Nothing on stderr: tests read it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    heard.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield heard
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
