"""Packages that bring parts: distributions with entry points, as an installer would leave them."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from medusa_cli.util.plugins import plugins

Install = Callable[[str, str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """(group, name, value) -> a distribution that brings it is on the path."""

    def bring(group: str, name: str, value: str) -> None:
        folder = tmp_path / "site" / f"another_{name}-1.0.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: another-{name}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
        plugins.cache_clear()

    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site")])
    plugins.cache_clear()
    yield bring
    plugins.cache_clear()
