"""Prompts are read in pieces that no forward chokes on, and what they leave is what one forward would."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_cli.model import prefill
from medusa_cli.model.forward_memory import ForwardMemory
from medusa_cli.model.prefill import LEAST, PREFILL_CHUNK, peak_bytes, pieces
from tests.tiny_models import final_hidden, prompt_of, target_of, tiny_config_of, tiny_model

LLAMA_1B = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128_256, "head_dim": 64,
}  # fmt: skip


def memory_of(attention: str) -> ForwardMemory:
    return ForwardMemory.of(tiny_config_of("llama", **LLAMA_1B), 4, attention)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 4000)), min_size=1, max_size=12), st.booleans())
def test_pieces_cover_every_prompt_once_and_none_takes_more_than_a_forward_may(
    rows: list[tuple[int, int]], eager: bool
) -> None:
    memory = memory_of("eager" if eager else "sdpa")
    prompts, held = [list(range(held + unread)) for held, unread in rows], [held for held, _ in rows]
    read = list(held)
    for piece in pieces(prompts, held, memory):
        columns = max(read[piece.row : piece.row + len(piece.ids)]) + max(piece.lengths)
        taken = memory.bytes(len(piece.ids), max(piece.lengths), columns)
        assert len(piece.ids) * max(piece.lengths) <= PREFILL_CHUNK
        assert taken <= memory.budget or (len(piece.ids) == 1 and piece.num_tokens <= LEAST)
        for row, ids in enumerate(piece.ids, start=piece.row):
            assert ids == prompts[row][read[row] : read[row] + len(ids)]
            read[row] += len(ids)
        assert piece.is_last == (read[piece.row] == len(prompts[piece.row]))
        assert piece.as_long_as == [len(prompts[row]) for row in range(piece.row, piece.row + len(piece.ids))]
    assert read == [len(prompt) for prompt in prompts]


def test_short_prompts_are_read_side_by_side_and_a_long_one_alone() -> None:
    read = list(pieces([[1] * 20] * 8 + [[1] * 1900] * 2, [0] * 10, memory_of("sdpa")))
    assert [(piece.row, len(piece.ids)) for piece in read if piece.row < 8] == [(0, 8)]
    assert {len(piece.ids) for piece in read if piece.row >= 8} == {1}


def test_rows_behind_a_long_common_beginning_are_few_at_a_time() -> None:
    # what they repeat of the keys they hold is more than what they read
    read = list(pieces([[1] * 6020] * 32, [6000] * 32, memory_of("sdpa")))
    assert [len(piece.ids) for piece in read] == [1] * 32


def test_the_largest_piece_is_known_before_there_are_any() -> None:
    for attention in ("sdpa", "eager"):
        memory = memory_of(attention)
        for rows, length in ((1, 7), (8, 100), (3, 1500), (64, 1790), (2, 9000)):
            taken = [
                memory.bytes(len(piece.ids), max(piece.lengths), length)
                for piece in pieces([[1] * length] * rows, [0] * rows, memory)
            ]
            assert max(taken) == peak_bytes(memory, rows, length)


@pytest.fixture
def tiny_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", 7)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=2e-4)


@pytest.mark.usefixtures("tiny_pieces")
@pytest.mark.parametrize("runner", ["eager", "packed"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "gpt2", "opt", "deepseek_v3"])
def test_what_is_read_in_pieces_is_what_one_forward_reads(name: str, runner: str) -> None:
    model = tiny_model(name)
    target = target_of(model, runner=runner)
    prompts = [prompt_of(3), prompt_of(2), prompt_of(30), prompt_of(1), prompt_of(17)]
    cache, told = target.new_cache(6, 0), []
    target.prefill([prompt_of(9)], cache)
    seen = target.prefill(prompts, cache, first_row=1, on_read=lambda *counts: told.append(counts))
    assert cache.lengths == [9, 3, 2, 30, 1, 17]
    assert told == [(read, 53) for read in (5, 12, 19, 26, 33, 35, 36, 43, 50, 53)]
    for row, prompt in enumerate(prompts):
        close(seen.hidden_BNH[row, 0], final_hidden(model, prompt)[-1])
        close(seen.logits_BNV[row, 0], model(torch.tensor([prompt])).logits[0, -1])


@pytest.mark.usefixtures("tiny_pieces")
def test_keys_and_values_of_pieces_are_those_of_one_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompts = target_of(tiny_model("llama")), [prompt_of(20), prompt_of(5), prompt_of(31)]
    bit_by_bit, at_once = target.new_cache(3, 0), target.new_cache(3, 0)
    target.prefill(prompts, bit_by_bit)
    monkeypatch.undo()
    assert len(list(pieces(prompts, [0] * 3, target.forward_memory))) == 1
    target.prefill(prompts, at_once)
    for ours, theirs in zip(bit_by_bit.layers, at_once.layers, strict=True):
        for row, prompt in enumerate(prompts):
            for one, other in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
                torch.testing.assert_close(
                    one[row, :, : len(prompt)], other[row, :, : len(prompt)], atol=1e-5, rtol=1e-5
                )


@pytest.mark.usefixtures("tiny_pieces")
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_hidden_states_of_texts_are_read_in_pieces_too(name: str) -> None:
    target, texts = target_of(tiny_model(name)), [prompt_of(3), prompt_of(2), prompt_of(25)]
    hidden_BTH = target.hidden(texts)
    for row, text in enumerate(texts):
        close(hidden_BTH[row, : len(text)], final_hidden(tiny_model(name), text))
        assert not hidden_BTH[row, len(text) :].any()


def test_a_prompt_that_holds_all_but_its_end_is_read_from_there() -> None:
    target, shared = target_of(tiny_model("llama")), prompt_of(12)
    cache = target.new_cache(3, 0)
    target.prefill([[*shared, 2, 7]], cache)
    cache.copy_prefix(0, slice(1, 3), 12)
    told: list[tuple[int, int]] = []
    seen = target.prefill([[*shared, 4], [*shared, 5, 6]], cache, first_row=1, on_read=lambda *one: told.append(one))
    assert told == [(3, 3)]
    close(seen.hidden_BNH[1, 0], final_hidden(tiny_model("llama"), [*shared, 5, 6])[-1])
