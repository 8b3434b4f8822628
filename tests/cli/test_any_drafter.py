"""Drafters that a user brings: a function by name or as an object, a model, several together; on the command line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import medusa_cli as medusa
from medusa_cli.cli.app import main
from medusa_cli.errors import PartError
from tests.tiny_folders import CHAT_TEMPLATE, save_tiny

MODULE = '''
def echo(tokens):
    """The last tokens once more."""
    return tokens[-4:]

def fails(tokens):
    return 1 // 0

NUMBER = 3
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("any") / "model", chat_template=CHAT_TEMPLATE))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a module in it that no other test has imported."""
    (tmp_path / f"guesses_{tmp_path.name}.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(model: str, *arguments: str) -> int:
    return main(["generate", "w5 w6 w7", "-m", model, "-n", "12", "--ignore-eos", "--device", "cpu", *arguments])


def function(here: Path, name: str) -> str:
    return f"python:guesses_{here.name}:{name}"


def test_a_function_of_the_working_directory_guesses(
    model: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert write(model, "--drafter", "none") == 0
    plain = capsys.readouterr().out
    for drafter in (function(here, "echo"), f"mixed:suffix,{function(here, 'echo')}"):
        assert write(model, "--drafter", drafter) == 0
        assert capsys.readouterr().out == plain


def test_a_function_that_fails_is_told_once_or_stops(
    model: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert write(model, "--drafter", "none") == 0
    plain = capsys.readouterr().out
    name = function(here, "fails")
    assert write(model, "--drafter", name) == 0
    told = capsys.readouterr()
    assert told.out == plain
    assert told.err.count("ZeroDivisionError") == 1
    place = f"guesses_{here.name}.py:7"
    assert place in told.err.replace("\n", "")
    assert write(model, "--drafter", name, "--drafter-errors", "raise") == 1
    told = capsys.readouterr()
    assert told.err.startswith(f"error: {name} failed at ")
    assert " hint:" in told.err


@pytest.mark.parametrize(
    ("name", "code", "told"),
    [
        ("python:no_such_module_at_all:f", 1, "can't be imported: No module named"),
        ("python:json:no_such_name", 1, "can't be imported"),
        ("python:json:__doc__", 1, "is no function"),
        ("python:json", 2, "names no function"),
        ("python:json:dumps:x", 2, "names no function"),
        ("ngarm", 2, "did you mean ngram?"),
        ("mixed:ngram,ngarm", 2, "there is no drafter 'ngarm'"),
        ("mixed:none", 2, "leave that one out"),
    ],
)
def test_a_name_that_is_none_is_told(
    model: str, name: str, code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert write(model, "--drafter", name) == code
    err = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert told in err
    assert "Traceback" not in err


def test_a_smaller_model_guesses(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert write(model, "--drafter", "none") == 0
    plain = capsys.readouterr().out
    draft = str(save_tiny(tmp_path / "draft", "gpt2", chat_template=CHAT_TEMPLATE))
    for name in (model, draft):
        assert write(model, "--drafter", "model", "--draft-model", name, "--speculate", "on") == 0
        assert capsys.readouterr().out == plain
    assert write(model, "--drafter", "model") == 1
    assert "--draft-model" in capsys.readouterr().err
    assert write(model, "--drafter", "model", "--draft-model", str(tmp_path / "gone")) == 1
    assert "gone" in capsys.readouterr().err
    assert write(model, "--drafter", "llama-cpp", "--draft-model", draft) == 1
    assert "llama-cpp" in capsys.readouterr().err


def test_a_memory_of_another_model_is_refused(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "replies")
    assert write(model, "--drafter", "suffix", "--suffix-memory", file) == 0
    first = capsys.readouterr().out
    assert write(model, "--drafter", "suffix", "--suffix-memory", file) == 0
    assert capsys.readouterr().out == first
    other = str(save_tiny(tmp_path / "other", hidden_size=16, chat_template=CHAT_TEMPLATE))
    assert write(other, "--drafter", "suffix", "--suffix-memory", file) == 1
    assert "holds replies of another model" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize("others", [(), ("--drafter", "none"), ("--drafter", "suffix", "--speculate", "off")])
def test_a_memory_that_nobody_copies_from_is_refused(
    model: str, others: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert write(model, "--suffix-memory", str(tmp_path / "replies"), *others) == 1
    assert "nobody copies from it" in capsys.readouterr().err.replace("\n", " ")


def test_what_two_clients_or_two_arms_must_not_share_is_a_usage_error(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "-m", model, "--suffix-memory", str(tmp_path / "replies")]) == 2
    assert "one client's replies for another" in " ".join(capsys.readouterr().err.split())
    drafting = ("--drafter", "llama-cpp", "--draft-model", "x.gguf", "--compare", "llama-cpp")
    assert main(["bench", "-m", model, *drafting]) == 2
    assert "two arms of one name" in " ".join(capsys.readouterr().err.split())


def test_python_takes_a_function(model: str) -> None:
    plain = medusa.load(model, drafter="none", device="cpu").generate("w5 w6 w7", max_new_tokens=12, ignore_eos=True)
    asked: list[Sequence[int]] = []

    def knows(tokens: Sequence[int]) -> Sequence[int]:
        asked.append(len(tokens))
        written = len(tokens) - start
        return plain[0].token_ids[written : written + 3]

    loaded = medusa.load(model, drafter=knows, speculate="on", device="cpu")
    prompt = loaded.tokenizer.apply_chat_template([{"role": "user", "content": "w5 w6 w7"}], tokenize=True)
    start = len(prompt["input_ids"] if not isinstance(prompt, list) else prompt)
    (reply,) = loaded.generate("w5 w6 w7", max_new_tokens=12, ignore_eos=True)
    assert reply.token_ids == plain[0].token_ids
    assert asked
    assert loaded.drafter.startswith("python:")


@pytest.mark.parametrize("shape", ["lambda", "method", "object"])
def test_any_callable_will_do(model: str, shape: str) -> None:
    class Guesses:
        def __call__(self, tokens: Sequence[int]) -> Sequence[int]:
            return [3]

        def guess(self, tokens: Sequence[int]) -> Sequence[int]:
            return [3]

    callables: dict[str, Any] = {"lambda": lambda tokens: [3], "method": Guesses().guess, "object": Guesses()}
    assert medusa.load(model, drafter=callables[shape], device="cpu").generate("w5", max_new_tokens=4)


def test_python_stops_where_it_is_to_stop(model: str) -> None:
    loaded = medusa.load(model, drafter=lambda tokens: 1 // 0, drafter_errors="raise", device="cpu")
    with pytest.raises(PartError, match=r"test_any_drafter.py:\d+: ZeroDivisionError"):
        loaded.generate("w5", max_new_tokens=4)
