"""Heads beside a target whose weights are theirs and whose tokenizer or template is another's."""

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.harness import Medusa


@pytest.fixture
def copied(tiny: Path, tmp_path: Path) -> Path:
    """The tiny model, to be changed."""
    return Path(shutil.copytree(tiny, tmp_path / "copied"))


def test_trained_heads_know_what_they_were_trained_with(heads: Path, generate: Medusa, copied: Path) -> None:
    traits = json.loads((heads / "heads.json").read_text())["config"]["traits"]
    assert {"words", "added", "template", "rows"} <= traits.keys()
    assert traits["rope"]["rope_type"] == "default"
    done = generate("Hi", "-m", copied, "-q")
    assert done.code == 0
    assert "warning" not in done.err


def test_another_template_is_a_warning_that_quiet_does_not_hide(generate: Medusa, copied: Path) -> None:
    template = copied / "chat_template.jinja"
    template.write_text(template.read_text() + "\n")
    done = generate("Hi", "-m", copied, "-q")
    assert done.code == 0
    assert done.err.count("warning: ") == 1
    assert "since these heads were trained: another chat template" in done.err


@pytest.mark.parametrize("command", [("generate", "Hi"), ("doctor",), ("bench",)])
def test_a_permuted_tokenizer_is_refused(medusa: Medusa, heads: Path, copied: Path, command: tuple[str, ...]) -> None:
    file = copied / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    words = tokenizer["model"]["vocab"]
    ordinary = [word for word in words if word not in {token["content"] for token in tokenizer["added_tokens"]}]
    ids = [words[word] for word in ordinary]
    words.update(zip(ordinary, ids[1:] + ids[:1], strict=True))
    file.write_text(json.dumps(tokenizer))
    done = medusa(*command, "-m", copied, "--heads", heads, "-q", "--dtype", "float32")
    assert done.code == 1
    assert "gives ids other words" in done.err
    assert done.err.count("error: ") == 1
