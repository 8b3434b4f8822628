"""What recording relies on where there is a GPU, tried on stand-ins: devices of shapes alone, and torch's own rules."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_cli.contracts import Seen
from medusa_cli.model.runners.cuda_graphs import WARM_UPS, on_cuda

ROOT = Path(__file__).parents[3]
GPU = torch.device("cuda", 1)


def test_what_is_recorded_takes_nothing_from_the_host() -> None:
    # in a process of its own: the devices it makes up stay
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/model/on_one_gpu.py"], capture_output=True, text=True, cwd=ROOT
    )
    assert run.returncode == 0, run.stdout
    assert "27 passed" in run.stdout


class Rules:
    """torch.cuda as far as a recorder uses it, with what torch refuses.

    A pool lives as long as one graph that was recorded into it; once its last has gone it can't be used again. A
    recording whose end fails leaves its stream the current one.
    """

    def __init__(self) -> None:
        self.current: Any = "first"
        self.devices = 0
        self.pools = 0
        self.users: dict[int, int] = {}
        self.recorded_on: list[Any] = []
        self.fails = False
        self.during = False

    def graph_pool_handle(self) -> int:
        self.pools += 1
        return self.pools

    def current_stream(self) -> "Stream":
        return Stream(self.current)

    @contextmanager
    def stream(self, stream: "Stream") -> Iterator[None]:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        yield

    @contextmanager
    def graph(self, graph: "Graph", pool: int, stream: "Stream", capture_error_mode: str) -> Iterator[None]:
        assert self.users.get(pool) != 0, "INTERNAL ASSERT FAILED: it->second->use_count > 0"
        assert capture_error_mode == "thread_local"
        self.users[pool] = self.users.get(pool, 0) + 1
        graph.rules, graph.pool = self, pool
        self.recorded_on.append(stream.name)
        self.current, self.during = stream.name, True
        try:
            yield
        finally:
            self.during = False
        if self.fails:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.current = "first"


class Stream:
    """By name; one made on a device is named by it."""

    def __init__(self, name: Any) -> None:
        self.name = name

    def wait_stream(self, other: "Stream") -> None:
        assert other.name != self.name


class Graph:
    """Gives its pool back when it goes."""

    rules: Rules | None = None
    pool = 0

    def replay(self) -> None:
        """Nothing runs here."""

    def __del__(self) -> None:
        if self.rules is not None:
            self.rules.users[self.pool] -= 1


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> Rules:
    found = Rules()
    for name in ("graph_pool_handle", "current_stream", "stream", "device", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(found, name))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    return found


def shown() -> Seen:
    return Seen(torch.zeros(1, 1, 1), torch.zeros(1, 1, 1))


def test_graphs_share_a_pool_and_one_whose_graphs_have_gone_is_left(rules: Rules) -> None:
    record = on_cuda(GPU)
    one, two = record(shown), record(shown)
    assert list(rules.users.values()) == [2]
    del one, two
    assert list(rules.users.values()) == [0]
    three = record(shown)
    assert list(rules.users.values()) == [0, 1]
    del three


def test_a_graph_is_recorded_after_warm_ups_on_a_stream_of_this_gpu(rules: Rules) -> None:
    runs = []

    def run() -> Seen:
        runs.append((rules.current, rules.during))
        return shown()

    kept = on_cuda(GPU)(run)
    assert runs == [(GPU, False)] * WARM_UPS + [(GPU, True)]
    assert rules.recorded_on == [GPU]
    assert kept.seen.logits_BNV.shape == (1, 1, 1)


def test_a_recording_that_fails_leaves_the_stream_that_was_current_and_the_next_one_works(rules: Rules) -> None:
    record = on_cuda(GPU)
    rules.fails = True
    with pytest.raises(RuntimeError, match="previous error"):
        record(shown)
    assert rules.current == "first"
    rules.fails = False
    kept = record(shown)
    assert kept.replay() is None
