"""`medusa serve` as a process of its own, on a free port, ready."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx


@dataclass(frozen=True)
class ServeProcess:
    """A server that runs."""

    url: str
    pid: int


@contextmanager
def serve_process(*flags: object) -> Iterator[ServeProcess]:
    """A server with these flags, until the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "medusa_cli", "serve", "--port", str(port), "-q", *map(str, flags)]
    running = subprocess.Popen(command, env=os.environ)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                assert running.poll() is None, "the server has ended"
            time.sleep(0.2)
        yield ServeProcess(url, running.pid)
    finally:
        running.terminate()
        running.wait(60)
