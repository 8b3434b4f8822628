"""What every test relies on: no network, one thread, fixed seeds, and none of the developer's own settings."""

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings

from medusa_cli.util.paths import say_once

# before torch and transformers are imported, which read these once
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", WANDB_MODE="disabled", TOKENIZERS_PARALLELISM="false")
os.environ.pop("COLUMNS", None)  # pytest-xdist has its workers draw so wide, and fixtures of a session print too
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _same_start(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The same random numbers and lines for each test, whatever ran before, and no setting or cache from outside."""
    say_once.cache_clear()
    for name in [name for name in os.environ if name.startswith("MEDUSA_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path_factory.getbasetemp() / "medusa-home"))
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The warnings of a test, whatever level the command line left behind."""
    caplog.set_level(logging.WARNING)
    return caplog


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users of the machine can enter, as they can't enter pytest's own."""
    with TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        yield Path(made).resolve()
