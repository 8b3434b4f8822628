"""`medusa serve` as a process: it opens its port, loads, answers, and ends when it is told to; and wrong flags."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from medusa_cli.cli.app import main
from tests.tiny_folders import CHAT_TEMPLATE, save_tiny

ROOT = Path(__file__).parents[2]
HI = {"messages": [{"role": "user", "content": "w5 w6"}], "temperature": 0, "max_tokens": 5}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("serve") / "tiny", chat_template=CHAT_TEMPLATE))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def running(model: str, port: int, *flags: str) -> Iterator[tuple[httpx.Client, list[str]]]:
    """The command as a process, ready, and what it has said once the block has ended."""
    command = [sys.executable, "-m", "medusa_cli", "serve", "-m", model, "--port", str(port), "--device", "cpu", *flags]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process, told = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment), list[str]()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            ends = time.monotonic() + 120
            while not _is_ready(client):
                assert process.poll() is None
                assert time.monotonic() < ends
                time.sleep(0.1)
            yield client, told
    finally:
        process.send_signal(signal.SIGTERM)
        told += process.communicate(timeout=60)[1].splitlines()
    assert process.returncode == -signal.SIGTERM, "the signal is handed on once all is done, as shells expect"


def test_it_answers_who_has_a_key_and_ends_when_told_to(model: str, tmp_path: Path) -> None:
    keys, port = tmp_path / "keys", free_port()
    keys.write_text("first\nsecond\n", encoding="utf-8")
    flags = ("--api-key", str(keys), "--served-model-name", "mine", "--max-num-seqs", "2")
    with running(model, port, *flags) as (client, lines):
        assert client.post("/v1/chat/completions", json=HI).status_code == 401
        answer = client.post("/v1/chat/completions", json=HI, headers={"Authorization": "Bearer second"})
        assert answer.status_code == 200
        assert answer.json()["model"] == "mine"
    told = "\n".join(lines)
    assert f"mine is served at http://127.0.0.1:{port}/v1" in told
    assert "Bearer" not in told
    assert "Traceback" not in told


def test_logs_as_json_are_json_line_by_line(model: str) -> None:
    port = free_port()
    with running(model, port, "--log-format", "json", "--host", "0.0.0.0") as (client, lines):
        assert client.post("/v1/chat/completions", json=HI).status_code == 200
        with socket.create_connection(("127.0.0.1", port)) as odd:
            odd.sendall(b"no request at all\r\n\r\n")
            assert b"400" in odd.recv(100)
    records = [json.loads(line) for line in lines]
    (request,) = (record for record in records if record["message"] == "request")
    assert request["status"] == 200
    assert request["completion_tokens"] > 0
    told = [record["message"] for record in records]
    assert [each for each in told if each in ("loading", "ready", "ended")] == ["loading", "ready", "ended"]
    assert any("can be reached from other machines" in each for each in told)
    assert any("Invalid HTTP" in each for each in told), "what the HTTP library reports is a line too"


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.ConnectError:
        return False


def test_what_can_not_be_served_is_told(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for flags, told in (
            (("--port", port), f"can't listen at 127.0.0.1:{port}"),
            (("--host", "999.1.1.1"), "can't listen at 999.1.1.1:8000"),
            (("--api-key", str(tmp_path / "nowhere")), "the file of keys can't be read"),
            (("--api-key", str(empty)), "holds no key"),
            (("--drafter", "model"), "needs a model that guesses"),
        ):
            assert main(["serve", "-m", model, *flags]) == 1
            err = capsys.readouterr().err
            assert told in " ".join(err.split())
            assert err.startswith("error: ")
            assert "\n hint: " in err
    assert main(["serve", "-m", model, "--port", "70000"]) == 2


def test_a_model_that_does_not_load_ends_the_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "-m", str(tmp_path / "nowhere"), "--port", str(free_port())]) == 1
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize("replicas", ["0", "3..2", "two", "1..", "999", "-1", "2..65", ""])
def test_replicas_are_a_number_or_a_range(replicas: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "-m", model, "--ray", f"--replicas={replicas}"]) == 2
    assert "replicas" in capsys.readouterr().err


def test_replicas_need_ray(model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["serve", "-m", model, "--replicas", "2"]) == 2
    assert "--replicas needs --ray" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["serve", "-m", model, "--ray"]) == 1
    err = capsys.readouterr().err
    assert "the package 'ray', which is not installed" in err
    assert "[ray]" in err
