"""llama.cpp as drafter: what it is asked and what its answers become; and the real one on tiny random files."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.assemble import DrafterChoice, load_drafter
from medusa_cli.contracts import Context
from medusa_cli.decode.loop import Parts, collect
from medusa_cli.decode.rows import Limits
from medusa_cli.drafters import llama_cpp
from medusa_cli.drafters.llama_cpp import DEPTH, TOO_LONG, WIDTH, LlamaCppGuesses
from medusa_cli.drafters.source import Wishes
from medusa_cli.drafters.translation import Coder
from medusa_cli.drafters.trie import Trie
from medusa_cli.errors import MissingExtra, TargetError
from medusa_cli.model.loading.gguf_header import read_words
from tests.tiny_folders import save_gguf, save_tiny, tiny_tokenizer
from tests.tiny_models import NUM_NEW, known, target_of, tiny_model


class FakeServer:
    """Writes the next letters of the alphabet, and holds the last one for half as likely."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.error: dict[str, Any] | None = None

    def handle_completions(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(asked)
        if self.error:
            return {"error": self.error}
        start = asked["prompt"][-1] if isinstance(asked["prompt"], list) else ord(asked["prompt"][-1])
        places = [self.place(start + place + 1) for place in range(asked["max_tokens"])]
        return {"choices": [{"text": "…", "logprobs": {"content": places}}]}

    def place(self, token: int) -> dict[str, Any]:
        others = [{"id": each, "token": chr(each), "logprob": math.log(p)} for each, p in ((token, 0.5), (90, 0.25))]
        return {**others[0], "top_logprobs": others}


LETTERS = Coder(lambda text: [ord(letter) for letter in text], lambda ids: "".join(map(chr, ids)))


def guessed(source: LlamaCppGuesses, tokens: Sequence[int]) -> Trie:
    trie = Trie(tokens[-1])
    source.add_guesses(Context([tokens], torch.tensor([tokens[-1]]), torch.zeros(1, 4)), [trie], 0.0)
    return trie


@pytest.mark.parametrize("coder", [None, LETTERS])
def test_a_chain_and_its_siblings_become_guesses_by_ids_or_by_text(coder: Coder | None) -> None:
    server = FakeServer()
    trie = guessed(LlamaCppGuesses(server, 100, 200, coder), [97, 98])
    assert len(trie.tokens) == 1 + 2 * DEPTH
    node = 0
    for place in range(DEPTH):
        assert trie.child(node, 90) is not None
        node = trie.child(node, 99 + place) or 0
        assert trie.chances[node] == pytest.approx(0.5 ** (place + 1))
    (asked,) = server.asked
    assert asked["prompt"] == ([97, 98] if coder is None else "ab")
    assert (asked["max_tokens"], asked["n_probs"], asked["cache_prompt"]) == (DEPTH, WIDTH, True)


def test_ids_past_the_vocabulary_are_no_guesses() -> None:
    trie = guessed(LlamaCppGuesses(FakeServer(), 100, 101, None), [97, 98])
    assert set(trie.tokens) == {98, 90, 99, 100}


def test_a_text_that_is_too_long_gets_no_guesses() -> None:
    server = FakeServer()
    assert guessed(LlamaCppGuesses(server, DEPTH + 1, 200, None), [97, 98]).tokens == [98]
    assert server.asked == []
    server.error = {"code": 400, "message": "too long", "type": TOO_LONG}
    assert guessed(LlamaCppGuesses(server, 100, 200, LETTERS), [97, 98]).tokens == [98]


def test_an_error_is_told() -> None:
    server = FakeServer()
    server.error = {"code": 500, "message": "out of luck", "type": "server_error"}
    with pytest.raises(TargetError, match="llama.cpp made no guess: out of luck"):
        guessed(LlamaCppGuesses(server, 100, 200, None), [97, 98])


# --- files ---

TARGET = target_of(tiny_model("llama"), tokenizer=tiny_tokenizer())


def load(file: str | Path) -> Any:
    choice = DrafterChoice("llama-cpp", speculate="on", wishes=Wishes(draft_model=str(file)))
    return load_drafter(choice, TARGET)


def test_the_words_of_a_file_are_read(tmp_path: Path) -> None:
    file = save_gguf(tmp_path / "tiny.gguf")
    reader = gguf.GGUFReader(file)
    words = [bytes(part).decode() for part in reader.fields["tokenizer.ggml.tokens"].parts[-1:]]
    found = read_words(file)
    assert found is not None
    assert found[-1] == words[0]
    file.write_bytes(file.read_bytes()[:100])
    assert read_words(file) is None


@pytest.fixture
def xllamacpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were installed."""
    monkeypatch.setattr(llama_cpp, "need", lambda *names: None)


@pytest.mark.usefixtures("xllamacpp")
def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "folder")
    with pytest.raises(TargetError, match=r"--drafter llama-cpp runs .gguf files, and .*folder is none"):
        load(folder)
    with pytest.raises(TargetError, match="nowhere"):
        load(tmp_path / "nowhere.gguf")


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "xllamacpp", None)
    with pytest.raises(MissingExtra, match="xllamacpp"):
        load(save_gguf(tmp_path / "tiny.gguf"))


def test_the_real_one_gives_the_greedy_text(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    drafter = load(save_gguf(tmp_path / "tiny.gguf"))
    for rows in (1, 2):
        found = collect(Parts(TARGET, drafter, Greedy()), known("llama").prompts, Limits(NUM_NEW), max_rows=rows)
        assert [each.token_ids for each in found] == known("llama").wanted(3)
    assert sum(each.num_steps for each in found) > 0


def test_the_real_one_refuses_what_is_no_model(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    file = save_gguf(tmp_path / "tiny.gguf")
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(TargetError, match="llama.cpp can't load"):
        load(file)
