"""`medusa cache` and `medusa models`: what is there, and that only what is ours goes."""

import re
from pathlib import Path

import pytest

from medusa_cli.cli.cache import KEPT
from tests.cli.harness import ROOT, Medusa

HASH = "0123456789abcdef01234567"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home in a folder that holds other things too."""
    folder = tmp_path / "home"
    monkeypatch.setenv("MEDUSA_HOME", str(folder))
    files = {
        f"models/tiny-{HASH[:12]}/model.safetensors": 2000, f"models/tiny-{HASH[:12]}.lock": 0,
        "models/my-own-model/model.safetensors": 50, "models/notes.txt": 5, f"remembered/checks/{HASH}.json": 30,
        f"code/kernels/blocks-{HASH[:16]}/blocks.so": 400, "photos/a.jpg": 9,
    }  # fmt: skip
    for name, size in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x" * size)
    folder.chmod(0o700)
    return folder


def files_of(home: Path) -> set[str]:
    return {str(file.relative_to(home)) for file in home.rglob("*") if file.is_file()}


def test_the_list_has_each_kind_with_count_and_bytes(home: Path, medusa: Medusa) -> None:
    document = medusa("cache", "ls", "--json").document
    found = {row["name"]: (row["count"], row["bytes"]) for row in document["kept"]}
    assert found == {name: (0, 0) for name in KEPT} | {"models": (1, 2000), "checks": (1, 30), "kernels": (1, 400)}
    assert document["bytes"] == 2430
    shown = medusa("cache", "ls").out
    assert f"2.4 kB in {home}" in shown


def test_clearing_leaves_what_is_not_ours(home: Path, medusa: Medusa) -> None:
    assert medusa("cache", "clear").out == f"cleared 2.4 kB in {home}: models, kernels, checks\n"
    others = {"models/my-own-model/model.safetensors", "models/notes.txt", "photos/a.jpg"}
    assert files_of(home) == others | {f"models/tiny-{HASH[:12]}.lock"}, "another process may hold the lock"
    assert medusa("cache", "clear").out == f"cleared 0 B in {home}: -\n"


def test_one_kind_is_cleared_by_its_name(home: Path, medusa: Medusa) -> None:
    before = files_of(home)
    assert medusa("cache", "clear", "checks", "--json").document["bytes"] == 30
    assert files_of(home) == before - {f"remembered/checks/{HASH}.json"}
    refused = medusa("cache", "clear", "photos")
    assert refused.code == 2
    assert "nothing is kept under the name photos; there are models" in refused.err


def test_what_a_link_leads_to_stays(home: Path, medusa: Medusa, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / f"{HASH}.json").write_text("{}")
    (home / "remembered").mkdir(exist_ok=True)
    (home / "remembered" / "costs").symlink_to(tmp_path / "elsewhere")
    (home / "models" / f"linked-{HASH[:12]}").symlink_to(tmp_path / "elsewhere")
    medusa("cache", "clear")
    assert (tmp_path / "elsewhere" / f"{HASH}.json").exists()
    assert not (home / "models" / f"linked-{HASH[:12]}").is_symlink()


def test_every_folder_of_the_home_is_told_about() -> None:
    source = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "medusa_cli").rglob("*.py"))
    made = set(re.findall(r'(?:cache|code)_home\(\) / "([\w-]+)"', source))
    facts = set(re.findall(r"^(?:KIND|KIND, CHOICES) = (.+)$", source, re.MULTILINE))
    kinds = set(re.findall(r'"(\w+)"', " ".join(facts))) | set(re.findall(r'remembered\.remember\("(\w+)"', source))
    assert (made - {"code", "remembered"}) | kinds == set(KEPT)


def test_the_names_of_models_say_which_have_heads(medusa: Medusa) -> None:
    rows = {row["name"]: row for row in medusa("models", "--json").document}
    assert rows["smollm2-135m"]["heads"] == ["medusa"]
    assert rows["qwen3-8b"] == {"name": "qwen3-8b", "source": "Qwen/Qwen3-8B", "heads": [], "here": False}
    shown = medusa("models").out
    assert all(name in shown for name in rows)
