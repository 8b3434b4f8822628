"""Text of arriving ids: joined chunks are the one-shot decode."""

import pytest
from hypothesis import given, settings
from transformers import PreTrainedTokenizerFast

from medusa_cli.decode.text import TextStream, decode_text
from medusa_cli.errors import RecipeError
from tests.decode.kinds import KINDS, arrivals, byte_fallback, byte_level, counted, ids_of, spelling_bytes_out


def chunks_of(
    tokenizer: PreTrainedTokenizerFast, ids: list[int], sizes: list[int], stops: tuple[str, ...] = ()
) -> list:
    """What a stream gives for ids that arrive in steps of these sizes (the last size goes on)."""
    stream, chunks, at = TextStream(tokenizer, stops), [], 0
    while at < len(ids):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        chunks.append(stream.feed(ids[at : at + size]))
        at += size
    return [*chunks, stream.flush()]


@settings(max_examples=150, deadline=None)
@given(arrivals())
def test_chunks_join_to_the_one_shot_decode(arrival: tuple[str, list[int], list[int]]) -> None:
    kind, ids, sizes = arrival
    tokenizer = KINDS[kind]()
    assert "".join(chunks_of(tokenizer, ids, sizes)) == decode_text(tokenizer, ids)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("text", ["hi 😀😀 there", "안녕하세요, 한국어", "今天天气很好。", "👩‍👩‍👧 family", "a"])
def test_no_half_character_is_streamed(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]()
    chunks = chunks_of(tokenizer, ids_of(tokenizer, text), [1])
    assert "".join(chunks) == text
    assert not any("\ufffd" in chunk for chunk in chunks)


def test_a_character_is_streamed_as_soon_as_it_is_whole() -> None:
    tokenizer = byte_level()
    ids = ids_of(tokenizer, "😀😀")
    chunks = chunks_of(tokenizer, ids, [1])
    assert len(ids) == 8
    assert chunks == ["", "", "", "😀", "", "", "", "😀", ""]


def test_byte_tokens_are_held_while_a_later_one_could_spoil_the_run() -> None:
    tokenizer = byte_fallback()
    euro = ids_of(tokenizer, "€")[-3:]
    assert tokenizer.decode([*euro, euro[0]]) == "\ufffd" * 4
    stream = TextStream(tokenizer)
    assert stream.feed(euro) == ""
    assert stream.feed(euro[:1]) == ""
    assert stream.flush() == "\ufffd" * 4


def test_a_reply_that_ends_on_incomplete_bytes_is_flushed() -> None:
    tokenizer = byte_level()
    ids = ids_of(tokenizer, "ok 😀")[:-1]
    stream = TextStream(tokenizer)
    assert stream.feed(ids) == "ok "
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_a_very_short_reply_is_streamed_whole() -> None:
    tokenizer = byte_level()
    assert "".join(chunks_of(tokenizer, ids_of(tokenizer, "a"), [1])) == "a"
    assert chunks_of(tokenizer, [], [1]) == [""]
    assert "".join(chunks_of(tokenizer, [tokenizer.eos_token_id], [1])) == ""


def test_all_tokens_of_one_step_are_streamed() -> None:
    tokenizer = byte_level()
    ids = ids_of(tokenizer, "the cat sat on the mat")
    assert len(ids) > 5
    assert TextStream(tokenizer).feed(ids) == "the cat sat on the mat"


def test_special_tokens_are_hidden_and_other_added_tokens_shown() -> None:
    tokenizer = byte_level()
    think = tokenizer.convert_tokens_to_ids("<think>")
    emoji = ids_of(tokenizer, "😀")
    ids = [think, emoji[0], emoji[1], tokenizer.eos_token_id, emoji[2], emoji[3], tokenizer.eos_token_id]
    assert "".join(chunks_of(tokenizer, ids, [1])) == "<think>😀"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_the_work_for_a_token_does_not_grow_with_the_answer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = KINDS[kind]()
    lone = ids_of(tokenizer, "é")[-2]
    with counted(tokenizer, monkeypatch) as decoded:
        for ids in (ids_of(tokenizer, "the cat sat " * 300), [lone, *ids_of(tokenizer, "the")] * 300):
            decoded.clear()
            chunks_of(tokenizer, ids, [1])
            assert max(decoded) < 32


def test_a_run_of_broken_bytes_keeps_the_window_short(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level()
    emoji = ids_of(tokenizer, "😀")
    with counted(tokenizer, monkeypatch) as decoded:
        for ids in ([emoji[0]] * 500, emoji[:2] * 300, emoji[1:3] * 300):
            decoded.clear()
            chunks = chunks_of(tokenizer, ids, [1])
            assert max(decoded) < 32
            assert "".join(chunks) == tokenizer.decode(ids)


@pytest.mark.parametrize("end", ["</s>", "▁the"])
@pytest.mark.parametrize("pattern", ["<0x80>", "<0xE2> <0x82> <0xAC>", "<0x80> ▁s", "\ufffd", "▁\ufffd"])
def test_twenty_times_the_answer_is_twenty_times_the_work(
    pattern: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = byte_fallback()
    ids = tokenizer.convert_tokens_to_ids(pattern.split())
    after = [*tokenizer.convert_tokens_to_ids([end]), *ids_of(tokenizer, "the cat")]
    with counted(tokenizer, monkeypatch) as decoded:
        work = []
        for times in (50, 1000):
            decoded.clear()
            chunks = chunks_of(tokenizer, [*ids * times, *after], [1])
            work.append(sum(decoded))
            assert "".join(chunks) == decode_text(tokenizer, [*ids * times, *after])
    assert work[1] <= 21 * work[0] + 100


# --- ids that end a turn ---


def test_an_id_that_ends_a_turn_is_no_text_whatever_the_tokenizer_calls_it() -> None:
    tokenizer = byte_level()
    think = tokenizer.convert_tokens_to_ids("<think>")
    ids = [*ids_of(tokenizer, "the cat"), think]
    assert decode_text(tokenizer, ids) == "the cat<think>"
    assert decode_text(tokenizer, ids, frozenset({think})) == "the cat"
    stream = TextStream(tokenizer, ends=frozenset({think}))
    assert stream.feed(ids) + stream.flush() == "the cat"


def test_a_byte_s_name_in_a_vocabulary_that_spells_it_out_is_a_word() -> None:
    tokenizer = spelling_bytes_out()
    ids = tokenizer.convert_tokens_to_ids(["<0x41>", "<0xE2>", "a"])
    assert chunks_of(tokenizer, ids, [1])[:2] == ["<0x41>", "<0xE2>"]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RecipeError, match="empty stop string"):
        TextStream(byte_level(), ["", "x"])


def test_text_that_may_start_a_stop_string_is_held_back_until_that_is_known() -> None:
    tokenizer = byte_level()
    stream = TextStream(tokenizer, ["\n\nUser:"])
    assert stream.feed(ids_of(tokenizer, "hello\n")) == "hello"
    assert stream.feed(ids_of(tokenizer, "there")) == "\nthere"
    assert stream.feed(ids_of(tokenizer, "\n\nUs")) == ""
    assert stream.feed(ids_of(tokenizer, "er: no")) == ""
    assert stream.stopped
    assert stream.feed(ids_of(tokenizer, "more")) == ""
    assert stream.flush() == ""


def test_held_back_text_is_flushed_when_the_stop_string_never_came() -> None:
    tokenizer = byte_level()
    stream = TextStream(tokenizer, ["\n\nUser:"])
    assert stream.feed(ids_of(tokenizer, "hello\n\nUse")) == "hello"
    assert stream.flush() == "\n\nUse"
    assert not stream.stopped
