"""What counts the forwards of the shared target."""

import pytest

from tests.decode.tiny_llama import TARGET, Counter


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    return Counter(TARGET(), monkeypatch)
