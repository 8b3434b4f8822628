"""A library written in Rust that breaks down over a file is told like any other fault of the file."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from medusa_cli.cli import app
from medusa_cli.errors import TargetError
from medusa_cli.model.loading.huggingface import fetch_tokenizer
from medusa_cli.model.loading.sources import find_source
from tests.tiny_folders import save_tiny

Panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})


def panic(*args: object, **kwargs: object) -> None:
    raise Panic("range end index 14 out of range for slice of length 12")


def test_a_panic_while_loading_is_a_fault_of_the_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "tiny")
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", panic)
    with pytest.raises(TargetError, match="can't load the tokenizer .*range end index 14") as caught:
        fetch_tokenizer(find_source(str(tmp_path / "tiny")), None)
    assert caught.value.hint


def test_a_panic_anywhere_else_is_one_line_and_a_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(app, "_run", panic)
    assert app.main(["doctor"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: tokenizers broke down: range end index 14")
    assert "\n hint: " in told


def test_an_end_that_is_no_panic_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "tiny")

    def leave(*args: object, **kwargs: object) -> None:
        raise SystemExit(7)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", leave)
    with pytest.raises(SystemExit):
        fetch_tokenizer(find_source(str(tmp_path / "tiny")), None)
