"""Text of arriving ids: joined chunks are the one-shot decode, and stop strings are found wherever they are cut."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from medusa_cli.decode.text import StopHit, StopStrings, TextStream, decode_text
from medusa_cli.errors import RecipeError

TEXTS = [
    "the cat sat on the mat",
    "Stop here.\n\nUser: hello",
    "한국어 문장입니다",
    "今天天气很好",
    "😀 👩‍👩‍👧 🎉 naïve café",
]


@functools.cache
def byte_level() -> PreTrainedTokenizerFast:
    """GPT-2's kind: a token is some bytes, often less than a character."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|im_end|>"]
    )
    inner.train_from_iterator(TEXTS[:2], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


@functools.cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """Llama 2's kind: words with a leading mark, and byte tokens for what the vocabulary lacks."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁etaoncs", "▁the", "▁cat", "▁s"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "c"), ("▁", "s"), ("▁c", "a"), ("▁ca", "t")]
    pieces += ["▁t", "h", "▁th", "▁c", "▁ca"]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    inner = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@functools.cache
def word_pieces() -> PreTrainedTokenizerFast:
    """BERT's kind: the decoder puts spaces between words, and the tokenizer likes to tidy up."""
    words = ["[UNK]", "cat", "##s", "sat", ".", "do", "##n", "'", "t", "not"]
    inner = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", clean_up_tokenization_spaces=True)


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "word_pieces": word_pieces}


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


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


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[str, list[int], list[int]]:
    """A kind of tokenizer, ids (text, lone bytes and specials mixed), and the sizes of the steps they come in."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    tokenizer = KINDS[kind]()
    ids: list[int] = []
    for _ in range(draw(st.integers(0, 6))):
        if draw(st.booleans()):
            ids += ids_of(tokenizer, draw(st.sampled_from(TEXTS)))
        else:
            ids += draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=12))
    return kind, ids, draw(st.lists(st.integers(1, 6), min_size=1, max_size=10))


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
    decoded: list[int] = []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **options: decoded.append(len(ids)) or decode(ids, **options))
    lone = ids_of(tokenizer, "é")[-2]
    for ids in (ids_of(tokenizer, "the cat sat " * 300), [lone, *ids_of(tokenizer, "the")] * 300):
        decoded.clear()
        chunks_of(tokenizer, ids, [1])
        assert max(decoded) < 32


def test_a_run_of_broken_bytes_keeps_the_window_short(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level()
    decoded: list[int] = []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **options: decoded.append(len(ids)) or decode(ids, **options))
    emoji = ids_of(tokenizer, "😀")
    for ids in ([emoji[0]] * 500, emoji[:2] * 300, emoji[1:3] * 300):
        decoded.clear()
        chunks = chunks_of(tokenizer, ids, [1])
        assert max(decoded) < 32
        assert "".join(chunks) == decode(ids)


def test_a_stop_string_that_ends_inside_a_step_is_cut_there() -> None:
    tokenizer = byte_level()
    so_far, new = ids_of(tokenizer, "the cat"), ids_of(tokenizer, " sat\n\nUser: the mat")
    hit = StopStrings(["\n\nUser:"], tokenizer).find(so_far, new)
    assert hit is not None
    kept = [*so_far, *new[: hit.num_new]]
    assert hit.num_new < len(new)
    assert "\n\nUser:" in decode_text(tokenizer, kept)
    assert "\n\nUser:" not in decode_text(tokenizer, kept[:-1])
    assert decode_text(tokenizer, kept)[: hit.text_end] == "the cat sat"


def test_a_stop_string_that_spans_steps_is_found_in_the_later_one() -> None:
    tokenizer = byte_level()
    ids = ids_of(tokenizer, "the cat\n\nUser: x")
    stops = StopStrings(["\n\nUser"], tokenizer)
    for cut in range(1, len(ids)):
        before, after = stops.find([], ids[:cut]), stops.find(ids[:cut], ids[cut:])
        found = before.num_new if before else cut + after.num_new if after else None
        assert found == stops.find([], ids).num_new


def test_a_stop_string_may_end_inside_a_token() -> None:
    tokenizer = byte_level()
    ids = ids_of(tokenizer, "on the mat")
    token = next(index for index in ids if len(tokenizer.decode([index])) >= 3)
    stop = tokenizer.decode([token])[:2]
    hit = StopStrings([stop], tokenizer).find([], ids)
    assert hit == StopHit(num_new=ids.index(token) + 1, text_end="on the mat".index(stop))


def test_a_stop_string_of_several_bytes_is_found_far_into_the_answer() -> None:
    for tokenizer in (byte_level(), byte_fallback()):
        text = "the cat " * 60 + "한국 😀"
        ids = ids_of(tokenizer, text)
        hit = StopStrings(["zebra", "한국 😀"], tokenizer).find(ids[:-1], ids[-1:])
        assert hit == StopHit(num_new=1, text_end=text.index("한"))


def test_no_stop_string_no_hit() -> None:
    tokenizer = byte_level()
    ids = ids_of(tokenizer, "the cat")
    assert StopStrings([], tokenizer).find([], ids) is None
    assert StopStrings(["dog", "cats"], tokenizer).find([], ids) is None


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RecipeError, match="empty stop string"):
        StopStrings(["", "x"], byte_level())


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


@settings(max_examples=150, deadline=None)
@given(
    arrivals(), st.lists(st.sampled_from(["t", "cat", "the c", "국", "気", "天天", "\n\n", "s o", "😀"]), max_size=3)
)
def test_the_stream_shows_what_the_stop_strings_leave(arrival: tuple[str, list[int], list[int]], stops: list) -> None:
    kind, ids, sizes = arrival
    tokenizer = KINDS[kind]()
    finder, seen, text = StopStrings(stops, tokenizer), [], None
    steps = iter([*sizes, *[sizes[-1]] * len(ids)])
    left = list(ids)
    while left and text is None:
        size = next(steps)
        new, left = left[:size], left[size:]
        hit = finder.find(seen, new)
        seen += new if hit is None else new[: hit.num_new]
        text = None if hit is None else decode_text(tokenizer, seen)[: hit.text_end]
    expected = decode_text(tokenizer, seen) if text is None else text
    assert text is not None or not any(stop in expected for stop in stops)
    assert "".join(chunks_of(tokenizer, seen, list(sizes), tuple(stops))) == expected
