"""A hub that can't be reached is found out once, soon, and without the client's own lines."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.constants  # noqa: F401 - the tests reach it by its name
import pytest

from medusa_cli.util.hub import settle_reach
from tests.cli.harness import in_two_lines

ROOT = Path(__file__).parents[2]


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> Any:
    """No environment that says offline, and a client that does what the test sets it to do."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    settle_reach.cache_clear()

    def client(fails: Exception | None) -> list[str]:
        asked: list[str] = []

        class Session:
            def head(self, url: str, timeout: float) -> None:
                asked.append(url)
                if fails:
                    raise fails

        monkeypatch.setattr(huggingface_hub, "get_session", Session)
        return asked

    yield client
    settle_reach.cache_clear()


class TransportError(Exception):
    """As the client's library calls it."""


@pytest.mark.parametrize("fault", [TransportError("no such host"), ConnectionError("refused"), TimeoutError()])
def test_without_an_answer_it_goes_on_offline_and_asks_once(online: Any, fault: Exception) -> None:
    asked = online(fault)
    settle_reach()
    settle_reach()
    assert asked == [huggingface_hub.constants.ENDPOINT]
    assert huggingface_hub.constants.HF_HUB_OFFLINE is True
    assert os.environ["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize("answer", [None, ValueError("an answer of an odd kind")])
def test_with_an_answer_of_whatever_kind_it_stays_online(online: Any, answer: Exception | None) -> None:
    online(answer)
    settle_reach()
    assert huggingface_hub.constants.HF_HUB_OFFLINE is False


@pytest.mark.parametrize("args", [("-m", "someone/some-model"), ("--heads", "someone/some-heads", "-m", "qwen3-8b")])
def test_a_model_that_can_not_be_fetched_is_told_in_two_lines(args: tuple[str, ...], tmp_path: Path) -> None:
    nobody = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "medusa_cli", "generate", "Hi", *args],
        capture_output=True, text=True, cwd=ROOT, env=os.environ | nobody,
    )  # fmt: skip
    assert done.returncode == 1
    assert in_two_lines(done.stderr)
    assert len(done.stderr.splitlines()) == 2, done.stderr
