"""A smaller model as drafter: its cache follows the texts, its chains are its own greedy text, and law 1 holds."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.assemble import DrafterChoice, check_choice, load_drafter
from medusa_cli.contracts import Context
from medusa_cli.decode.engine import Engine, Request
from medusa_cli.decode.loop import Parts, collect
from medusa_cli.decode.rows import Limits
from medusa_cli.drafters.draft_model import DEPTH, WIDTH, ModelGuesses
from medusa_cli.drafters.mixed import Budget, GatheredDrafter
from medusa_cli.drafters.source import Wishes
from medusa_cli.drafters.translation import SameIds
from medusa_cli.drafters.trie import Trie
from medusa_cli.errors import MedusaError, RecipeError
from medusa_cli.model.target import Target
from tests.tiny_folders import save_tiny, tiny_tokenizer
from tests.tiny_models import NUM_NEW, VOCAB, by_whole_forwards, known, prompt_of, target_of, tiny_model

TARGET = functools.cache(lambda: target_of(tiny_model("llama"), tokenizer=tiny_tokenizer()))
OTHER = functools.cache(lambda: target_of(tiny_model("gpt2")))


def guesses_of(draft: Target) -> ModelGuesses:
    return ModelGuesses(draft, SameIds(VOCAB))


def guessed(source: ModelGuesses, texts: Sequence[Sequence[int]]) -> list[Trie]:
    tries = [Trie(tokens[-1]) for tokens in texts]
    roots = torch.tensor([tokens[-1] for tokens in texts])
    source.add_guesses(Context(texts, roots, torch.zeros(len(texts), 4)), tries, 0.0)
    return tries


def chain(trie: Trie, length: int) -> list[int]:
    """Down the likeliest children."""
    path, node = [], 0
    for _ in range(length):
        children = [child for child in range(1, len(trie.tokens)) if trie.parents[child] == node]
        node = max(children, key=lambda child: trie.chances[child])
        path.append(trie.tokens[node])
    return path


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text"])
def test_a_chain_is_the_models_own_text_wherever_the_row_was_cut_or_went_on(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_cli.drafters.draft_model.UNLIKELY", 0.0)
    model = tiny_model(name)
    source = guesses_of(target_of(model))
    texts = [prompt_of(5), prompt_of(11)]
    source.join(0, texts, None)
    for grown in ([[3], [4, 5, 6]], [[3, 9], [4, 5, 6, 7]], [[3, 9, 2, 2, 2, 2, 2, 2, 2], [4, 1]]):
        rows = [[*text, *more] for text, more in zip(texts, grown, strict=True)]
        for row, trie in zip(rows, guessed(source, rows), strict=True):
            assert chain(trie, DEPTH) == by_whole_forwards(model, row, DEPTH)
            assert len(trie.tokens) == 1 + DEPTH * WIDTH


def test_only_what_changed_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa_cli.drafters.draft_model.UNLIKELY", 0.0)
    draft, read = target_of(tiny_model("llama")), []
    read_piece = draft.read_piece
    monkeypatch.setattr(
        draft, "read_piece", lambda piece, *rest: read.append(piece.num_tokens) or read_piece(piece, *rest)
    )
    source, text = guesses_of(draft), prompt_of(11)
    source.join(0, [text], None)
    (trie,) = guessed(source, [[*text, 5]])
    right = chain(trie, DEPTH)
    guessed(source, [[*text, 5, *right[:3], (right[3] + 1) % VOCAB]])
    guessed(source, [[*text, 5, *right[:3], (right[3] + 1) % VOCAB, 7]])
    assert read == [12, 1, 1]


def test_an_unlikely_chain_is_not_drawn_on() -> None:
    source, text = guesses_of(target_of(tiny_model("llama"))), prompt_of(11)
    source.join(0, [text], None)
    (trie,) = guessed(source, [[*text, 5]])
    deepest = max(trie.chances[node] for node in range(1, len(trie.tokens)))
    assert len(trie.tokens) < 1 + DEPTH * WIDTH
    assert deepest <= 1


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("draft", [TARGET, OTHER])
def test_the_text_is_the_greedy_one(draft: Callable[[], Target], rows: int) -> None:
    drafter = GatheredDrafter([guesses_of(draft())], Budget(8), "model")
    for _ in range(2):
        found = collect(Parts(TARGET(), drafter, Greedy()), known("llama").prompts, Limits(NUM_NEW), max_rows=rows)
        assert [each.token_ids for each in found] == known("llama").wanted(3)
    if draft is TARGET:
        assert max(each.num_steps for each in found) <= NUM_NEW // 2, "it knows what it will say"


def test_rows_that_come_and_go_leave_the_others_their_guesses() -> None:
    source = guesses_of(TARGET())
    engine = Engine(TARGET(), GatheredDrafter([source], Budget(8), "model"), max_rows=2)
    keys = [engine.add(Request(prompt, Limits(6 + 4 * place))) for place, prompt in enumerate(known("llama").prompts)]
    written: dict[int, list[int]] = {key: [] for key in keys}
    steps = 0
    while not engine.idle:
        steps += 1
        for gain in engine.step():
            written[gain.row.key] += gain.tokens
    for place, key in enumerate(keys):
        assert written[key] == known("llama").wanted(3, 6 + 4 * place)[place]
    assert steps < 14


def test_a_text_that_is_too_long_for_the_model_gets_no_guesses() -> None:
    small = target_of(tiny_model("gpt2", n_positions=16))
    source = guesses_of(small)
    texts = [prompt_of(5), prompt_of(17)]
    source.join(0, texts, None)
    short, long = guessed(source, [[*text, 3] for text in texts])
    assert len(short.tokens) > 1
    assert long.tokens == [3]


def test_the_command_line_names_the_model(tmp_path: Path) -> None:
    folder = str(save_tiny(tmp_path / "draft"))
    drafter = load_drafter(DrafterChoice("model", wishes=Wishes(draft_model=folder)), TARGET())
    assert drafter.name == "model"
    found = collect(Parts(TARGET(), drafter, Greedy()), known("llama").prompts, Limits(NUM_NEW), max_rows=2)
    assert [each.token_ids for each in found] == known("llama").wanted(3)


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        (DrafterChoice("model"), "--drafter model needs a model that guesses"),
        (DrafterChoice("mixed:ngram,model"), "--drafter mixed:ngram,model needs a model that guesses"),
        (DrafterChoice("ngram", wishes=Wishes(draft_model="x")), "--draft-model is given, and ngram runs no model"),
        (DrafterChoice("mixed:medusa,none"), "mixed:medusa,none: no guesses: plain decoding"),
        (DrafterChoice("mixed:medusa,hydra"), "takes heads of 2 kinds"),
        (DrafterChoice("mixed:"), "there is no drafter ''"),
        (DrafterChoice("python:nothing"), "'python:nothing' names no function"),
        (DrafterChoice("modle"), "there is no drafter 'modle'"),
    ],
)
def test_what_can_not_be_is_refused_before_a_model_is_loaded(choice: DrafterChoice, told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        check_choice(choice, "smollm2-135m")


def test_a_model_that_is_not_there_is_told(tmp_path: Path) -> None:
    choice = DrafterChoice("model", wishes=Wishes(draft_model=str(tmp_path / "nowhere")))
    with pytest.raises(MedusaError, match="nowhere"):
        load_drafter(choice, TARGET())
