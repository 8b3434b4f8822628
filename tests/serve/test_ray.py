"""Several replicas under Ray: `make test-ray`. Processes of their own, each a minute to start on a small machine.

Skipped where Ray isn't installed. tests/serve/test_front.py holds what needs no Ray.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from medusa_cli.acceptance.sampling import GREEDY
from medusa_cli.config.recipe import TargetSettings
from medusa_cli.decode.chat import ends_of
from medusa_cli.decode.engine import Engine, Request
from medusa_cli.drafters.none import NoDrafter
from medusa_cli.model.loading.load import load_target
from medusa_cli.model.target import Target
from tests.serve.test_api import GO, WORDS
from tests.tiny_folders import CHAT_TEMPLATE, save_tiny

pytest.importorskip("ray.serve", reason="Ray isn't installed: make test-ray installs it beside")

ROOT = Path(__file__).parents[2]
PATIENCE_S = 240


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("ray") / "tiny", chat_template=CHAT_TEMPLATE))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Running:
    """A server over Ray, as a process."""

    def __init__(self, process: "subprocess.Popen[str]", port: int) -> None:
        self.process, self.url = process, f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=120, limits=httpx.Limits(max_connections=100))

    def replicas(self) -> int:
        try:
            return int(self.client.get("/health").json()["replicas"])
        except httpx.TransportError:
            return 0

    def engines(self) -> list[int]:
        """Processes of its replicas."""
        return [pid for pid in below(self.process.pid) if title_of(pid).startswith("ray::ServeReplica:medusa:engine")]

    def is_told(self, status: int, path: str) -> bool:
        try:
            return self.client.get(path).status_code == status
        except httpx.TransportError:
            return False

    def waits_for(self, condition: Any) -> None:
        ends = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None, "the server has ended"
            assert time.monotonic() < ends
            time.sleep(0.3)

    def figure(self, name: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"medusa:{name}"))


def below(pid: int) -> list[int]:
    """Processes that one has started, and those that they have."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = {int(child): int(parent) for child, parent in map(str.split, listed.splitlines())}
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]


def title_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


@contextmanager
def running(*command: str) -> Iterator[Running]:
    """A server, told its port last; with it ends all that it started."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, *command, str(port)], text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    try:
        yield Running(process, port)
    finally:
        children = below(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, -signal.SIGTERM), "it ends in order"
        ends = time.monotonic() + 60
        while left := [title for pid in children if (title := title_of(pid))]:
            assert time.monotonic() < ends, left
            time.sleep(0.3)


@pytest.fixture(scope="module")
def served(model: str) -> Iterator[Running]:
    flags = ("--ray", "--device", "cpu", "--replicas", "2", "--max-num-seqs", "4")
    with running("-m", "medusa_cli", "serve", "-m", model, *flags, "--port") as found:
        found.waits_for(lambda: found.replicas() == 2)
        yield found


@pytest.fixture(scope="module")
def alone(model: str) -> Target:
    return load_target(TargetSettings(model=model, device="cpu"))


def text_of(target: Target, prompt: list[int], max_tokens: int) -> str:
    """The greedy text, written by an engine in this process."""
    engine = Engine(target, NoDrafter())
    engine.add(Request(prompt, ends_of(target, max_tokens, (), ignore_eos=True).limits, GREEDY))
    written: list[int] = []
    while not engine.idle:
        for gain in engine.step():
            written += gain.tokens
    return str(target.tokenizer.decode(written, skip_special_tokens=True))


def prompt_of(number: int) -> list[int]:
    return [5 + number % 40, 9 + number % 7, 11 + number % 13]


def test_the_openai_client_streams_what_it_is_told_whole(served: Running) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    (name,) = [model.id for model in client.models.list()]
    asked: dict[str, Any] = {"model": name, "messages": [{"role": "user", "content": "w5 w6"}], "temperature": 0}
    whole = client.chat.completions.create(**asked, max_tokens=12).choices[0].message.content
    chunks = list(client.chat.completions.create(**asked, max_tokens=12, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert len(chunks) > 2
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**asked | {"model": "another"})


def test_no_request_is_lost_with_its_replica_unless_its_words_have_begun(served: Running, alone: Target) -> None:
    served.waits_for(lambda: served.replicas() == 2)
    wanted = [text_of(alone, prompt_of(number), 50) for number in range(50)]

    def ask(number: int) -> str:
        document = GO | {"model": None, "prompt": prompt_of(number), "max_tokens": 50, "ignore_eos": True}
        if number % 2:
            answer = served.client.post(WORDS, json=document)
            assert answer.status_code == 200, answer.text
            return "whole" if answer.json()["choices"][0]["text"] == wanted[number] else "other"
        with served.client.stream("POST", WORDS, json=document | {"stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        is_whole = lines[-1] == "[DONE]"
        chunks = [json.loads(line) for line in (lines[:-1] if is_whole else lines)]
        told = [chunk["error"]["code"] for chunk in chunks if "error" in chunk]
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks if "error" not in chunk)
        if is_whole:
            return "whole" if text == wanted[number] and not told else "other"
        begun = bool(text) and wanted[number].startswith(text) and told == ["replica_lost"] and "error" in chunks[-1]
        return "told" if begun else "other"

    broken = served.figure("streams_broken_off_total")
    with ThreadPoolExecutor(50) as clients:
        asked = [clients.submit(ask, number) for number in range(50)]
        served.waits_for(lambda: sum(each.done() for each in asked) > 4)
        lost, *_ = served.engines()
        os.kill(lost, signal.SIGKILL)
        ends = Counter(each.result() for each in asked)
    assert set(ends) <= {"whole", "told"}, ends
    assert ends["whole"] >= 25
    assert served.figure("streams_broken_off_total") - broken == ends["told"]
    served.waits_for(lambda: served.replicas() == 2 and len(served.engines()) == 2)
    assert lost not in served.engines()


def test_clients_that_leave_free_their_rows(served: Running) -> None:
    served.waits_for(lambda: served.replicas() == 2)
    document = GO | {"model": None, "max_tokens": 50, "ignore_eos": True, "speculate": False}

    def ask_and_leave(number: int) -> None:
        asked = document | {"prompt": prompt_of(number), "stream": number % 2 == 0}
        with httpx.Client(base_url=served.url, timeout=0.02 + number % 10 / 50) as client:
            try:
                client.post(WORDS, json=asked)
            except httpx.TimeoutException:
                return

    with ThreadPoolExecutor(40) as clients:
        list(clients.map(ask_and_leave, range(120)))
    served.waits_for(lambda: served.figure("num_requests_running") + served.figure("num_requests_waiting") == 0)
    assert served.client.post(WORDS, json=document | {"max_tokens": 2}).status_code == 200


def test_what_can_not_be_served_is_told(model: str, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for flags, told, surroundings in (
            (("-m", model, "--port", str(taken.getsockname()[1])), "can't listen at 127.0.0.1", {}),
            (("-m", str(tmp_path / "nowhere"), "--port", str(free_port())), "nowhere", {}),
            (("-m", model, "--device", "cuda:1"), "write device cuda", {}),
            (("-m", model, "--port", str(free_port())), "Ray can't be had", {"RAY_ADDRESS": "127.0.0.1:1"}),
        ):
            run = subprocess.run(
                [sys.executable, "-m", "medusa_cli", "serve", "--ray", *flags],
                capture_output=True, text=True, timeout=PATIENCE_S,
                env=os.environ | {"PYTHONPATH": str(ROOT)} | surroundings,
            )  # fmt: skip
            assert run.returncode == 1, run.stderr
            assert told in run.stderr
            assert "\n hint: " in run.stderr
            assert "Traceback" not in run.stderr


def test_serve_run_serves_the_same_behind_rays_proxy(model: str, alone: Target) -> None:
    program = (
        "import os, signal, sys, time, ray; from ray import serve; from medusa_cli.serve.ray_app import app\n"
        "ray.init('local', num_cpus=4, object_store_memory=128 * 2**20, include_dashboard=False)\n"
        "serve.start(http_options={'port': int(sys.argv[2])})\n"
        "signal.signal(signal.SIGTERM, lambda *_: (serve.shutdown(), ray.shutdown(), os._exit(0)))\n"
        "serve.run(app({'model': sys.argv[1], 'device': 'cpu', 'replicas': '1..2', 'api_key': 'mine'}))\n"
        "time.sleep(10**6)\n"
    )
    with running("-c", program, model) as started:
        started.waits_for(lambda: started.is_told(200, "/health"))
        assert started.client.post(WORDS, json=GO).status_code == 401
        answer = started.client.post(
            WORDS,
            json=GO | {"model": None, "prompt": [5, 6, 7], "max_tokens": 20, "ignore_eos": True, "stream": True},
            headers={"Authorization": "Bearer mine"},
        )
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert lines[-1] == "[DONE]"
        text = "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])
        assert text == text_of(alone, [5, 6, 7], 20)
