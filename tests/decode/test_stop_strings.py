"""Stop strings are found wherever tokens and steps are cut, with work that doesn't grow with the answer."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from medusa_cli.decode.stop_strings import StopStrings
from medusa_cli.decode.text import TextStream, decode_text
from medusa_cli.errors import RecipeError
from tests.decode.kinds import KINDS, arrivals, byte_fallback, byte_level, counted, ids_of


def found_at(stops: list[str], tokenizer: Any, *steps: list[int]) -> int | None:
    """How many of all ids reach a stop string, told in these steps."""
    finder, before = StopStrings(stops, tokenizer).finder(), 0
    for step in steps:
        if (count := finder(step)) is not None:
            return before + count
        before += len(step)
    return None


def test_a_stop_string_that_ends_inside_a_step_is_cut_there() -> None:
    tokenizer = byte_level()
    so_far, new = ids_of(tokenizer, "the cat"), ids_of(tokenizer, " sat\n\nUser: the mat")
    end = found_at(["\n\nUser:"], tokenizer, so_far, new)
    assert end is not None
    kept = [*so_far, *new][:end]
    assert len(so_far) < end < len(so_far) + len(new)
    assert "\n\nUser:" in decode_text(tokenizer, kept)
    assert "\n\nUser:" not in decode_text(tokenizer, kept[:-1])


def test_a_stop_string_that_spans_steps_is_found_in_the_later_one() -> None:
    tokenizer = byte_level()
    ids = ids_of(tokenizer, "the cat\n\nUser: x")
    whole = found_at(["\n\nUser"], tokenizer, ids)
    assert whole is not None
    for cut in range(1, len(ids)):
        assert found_at(["\n\nUser"], tokenizer, ids[:cut], ids[cut:]) == whole


def test_a_stop_string_may_end_inside_a_token() -> None:
    tokenizer = byte_level()
    ids = ids_of(tokenizer, "on the mat")
    token = next(index for index in ids if len(tokenizer.decode([index])) >= 3)
    assert found_at([tokenizer.decode([token])[:2]], tokenizer, ids) == ids.index(token) + 1


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_stop_string_of_several_bytes_is_found_far_into_the_answer(kind: str) -> None:
    tokenizer = KINDS[kind]()
    ids = ids_of(tokenizer, "the cat " * 60 + "한국 😀")
    assert found_at(["zebra", "한국 😀"], tokenizer, ids[:-1], ids[-1:]) == len(ids)


def test_a_stop_string_amid_byte_tokens_ends_the_answer_with_its_last_byte() -> None:
    tokenizer = byte_fallback()
    ids = ids_of(tokenizer, "한국어 문장")
    end = found_at(["국"], tokenizer, ids)
    assert end is not None
    assert decode_text(tokenizer, ids[:end]) == "한국"


def test_bytes_that_are_no_text_hide_what_would_be_a_stop_string() -> None:
    tokenizer = byte_fallback()
    broken = tokenizer.convert_tokens_to_ids(["<0x80>", "<0x41>", "<0x41>"])
    assert found_at(["AA"], tokenizer, broken[1:]) == 2
    assert decode_text(tokenizer, broken) == "\ufffd" * 3
    assert found_at(["AA"], tokenizer, broken * 9) is None
    assert found_at(["\ufffd" * 4], tokenizer, broken * 9) == 4


def test_no_stop_string_is_found_nowhere() -> None:
    tokenizer = byte_level()
    ids = ids_of(tokenizer, "the cat")
    assert found_at([], tokenizer, ids) is None
    assert found_at(["dog", "cats"], tokenizer, ids) is None


@pytest.mark.parametrize("pattern", ["<0x80>", "<0x80> <0x41>", "<0x41>", "<0xE2> <0x82> <0xAC>", "▁cat"])
def test_twenty_times_the_answer_is_twenty_times_the_work(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_fallback()
    ids = tokenizer.convert_tokens_to_ids(pattern.split())
    with counted(tokenizer, monkeypatch) as decoded:
        work = []
        for times in (50, 1000):
            decoded.clear()
            assert found_at(["AAB", "zebra", "\u20acA"], tokenizer, *([one] for one in ids * times)) is None
            work.append(sum(decoded))
    assert work[1] <= 21 * work[0] + 100


# --- special tokens ---


def test_a_special_token_stops_as_a_token() -> None:
    tokenizer = byte_level()
    ids = ids_of(tokenizer, "the cat<|im_end|> sat")
    end = found_at(["<|im_end|>"], tokenizer, ids)
    assert end == ids.index(tokenizer.eos_token_id) + 1
    stream = TextStream(tokenizer, ["<|im_end|>"])
    assert stream.feed(ids) + stream.flush() == "the cat"
    assert stream.stopped


def test_what_was_held_back_before_a_special_token_that_stops_is_shown() -> None:
    tokenizer = byte_fallback()
    stream = TextStream(tokenizer, ["</s>", "€€"])
    assert stream.feed(ids_of(tokenizer, "€")) == ""
    assert stream.feed([tokenizer.eos_token_id, *ids_of(tokenizer, "the")]) == "€"
    assert stream.feed(ids_of(tokenizer, "the")) == ""


def test_a_string_spelt_like_a_special_token_stops_too() -> None:
    tokenizer = byte_level()
    spelt = [index for letter in "<|im_end|>" for index in ids_of(tokenizer, letter)]
    assert tokenizer.eos_token_id not in spelt
    assert found_at(["<|im_end|>"], tokenizer, spelt) == len(spelt)


def test_a_stop_string_with_a_special_token_inside_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"holds the special token <\|im_end\|>, which is no text"):
        StopStrings(["<|im_end|>\n"], byte_level())


def test_an_added_token_that_is_text_stops_as_text() -> None:
    tokenizer = byte_level()
    assert tokenizer.added_tokens_decoder[tokenizer.convert_tokens_to_ids("<think>")] == AddedToken(
        "<think>", special=False, normalized=True
    )
    ids = ids_of(tokenizer, "the<think>cat")
    assert found_at(["e<think>c"], tokenizer, ids) is not None


# --- with the stream ---


@settings(max_examples=100, deadline=None)
@given(
    arrivals(),
    st.lists(st.sampled_from(["t", "cat", "the c", "국", "気", "天天", "\n\n", "s o", "😀", "\ufffd" * 2]), max_size=3),
)
def test_the_stream_shows_what_the_stop_strings_leave(arrival: tuple[str, list[int], list[int]], stops: list) -> None:
    kind, ids, sizes = arrival
    tokenizer = KINDS[kind]()
    finder, stream, shown, seen, end = (
        StopStrings(stops, tokenizer).finder(),
        TextStream(tokenizer, stops),
        "",
        [],
        None,
    )
    steps = iter([*sizes, *[sizes[-1]] * len(ids)])
    left = list(ids)
    while left and end is None:
        size = next(steps)
        new, left = left[:size], left[size:]
        end = finder(new)
        seen += new if end is None else new[:end]
        shown += stream.feed(new if end is None else new[:end])
    shown += stream.flush()
    first = next(
        (n for n in range(len(ids) + 1) if any(stop in decode_text(tokenizer, ids[:n]) for stop in stops)), None
    )
    assert len(seen) == (len(ids) if first is None else first)
    whole = decode_text(tokenizer, seen)
    assert shown == whole[: min([whole.find(stop) for stop in stops if stop in whole], default=len(whole))]
