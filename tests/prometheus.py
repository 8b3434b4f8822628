"""A real Prometheus of a test's own, that scrapes one server; and the dashboard's queries as Grafana sends them."""

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

DASHBOARD = Path(__file__).parents[1] / "docs" / "grafana.json"
PROGRAM = shutil.which("prometheus")


@dataclass(frozen=True)
class Prometheus:
    """One that runs."""

    url: str

    def ask(self, path: str, **fields: Any) -> Any:
        """What it answers. Raises AssertionError with its words for a query that it can't read."""
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=fields, timeout=30).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def wait_for(self, query: str, patience_s: float = 60.0) -> None:
        """Until a query has a result."""
        ends = time.monotonic() + patience_s
        while not self.ask("query", query=query)["result"]:
            assert time.monotonic() < ends, f"nothing for {query}"
            time.sleep(0.2)


@contextmanager
def prometheus(folder: Path, server: str, seconds: int = 1) -> Iterator[Prometheus]:
    """It scrapes the server at this address every so many seconds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = folder / "prometheus.yml"
    targets = [{"targets": [server.removeprefix("http://")]}]
    scrapes = [{"job_name": "medusa", "static_configs": targets}]
    config.write_text(json.dumps({"global": {"scrape_interval": f"{seconds}s"}, "scrape_configs": scrapes}))
    assert PROGRAM is not None
    flags = [f"--config.file={config}", f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}"]
    running = subprocess.Popen([PROGRAM, *flags], stderr=subprocess.DEVNULL)
    found = Prometheus(f"http://127.0.0.1:{port}")
    try:
        ends = time.monotonic() + 60
        while True:
            try:
                if httpx.get(f"{found.url}/-/ready", timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                assert running.poll() is None, "prometheus has ended"
            assert time.monotonic() < ends
            time.sleep(0.1)
        yield found
    finally:
        running.terminate()
        running.wait(30)


def queries(interval: str = "1m") -> list[tuple[str, str, str]]:
    """Title, legend and query of each target of the dashboard, its variables filled in."""
    found = []
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", interval).replace("$instance", ".*")
            found.append((panel["title"], target["legendFormat"], query))
    return found
