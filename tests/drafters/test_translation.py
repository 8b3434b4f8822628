"""Guesses carried over from one vocabulary to another: by ids where they agree, else by text, or not at all."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from medusa_cli.drafters.translation import ByText, Coder, Guessed, SameIds, between
from medusa_cli.errors import TargetError
from tests.tiny_folders import tiny_tokenizer

LETTERS = [chr(number) for number in range(32, 127)]


def letters_tokenizer(extra: int = 0, *, lowers: bool = False) -> PreTrainedTokenizerFast:
    """One token a character; their order turned by `extra`."""
    order = LETTERS[extra:] + LETTERS[:extra]
    core = Tokenizer(
        WordLevel({letter: number for number, letter in enumerate([*order, "\n", "\t", "<unk>"])}, "<unk>")
    )
    core.pre_tokenizer = Split("", "isolated")
    if lowers:
        core.normalizer = Lowercase()
    from tokenizers.decoders import Fuse

    core.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


def pairs(text: str) -> list[str]:
    """Two letters at a time, from the left."""
    return [text[start : start + 2] for start in range(0, len(text), 2)]


PAIRS: list[str] = []


def encode_pairs(text: str) -> list[int]:
    for pair in pairs(text):
        if pair not in PAIRS:
            PAIRS.append(pair)
    return [PAIRS.index(pair) for pair in pairs(text)]


BY_PAIRS = Coder(encode_pairs, lambda ids: "".join(PAIRS[number] for number in ids))
BY_LETTERS = Coder(lambda text: [ord(letter) for letter in text], lambda ids: "".join(map(chr, ids)))


def test_one_vocabulary_is_carried_over_by_ids() -> None:
    ours = letters_tokenizer()
    translation = between(ours, letters_tokenizer(), ("target", "draft"))
    assert isinstance(translation, SameIds)
    assert translation.to_draft((3, 4)) == [3, 4]
    last = len(ours)
    assert translation.from_draft([1], [1], Guessed([5, last, 6], [0.9, 0.8, 0.7])) == Guessed([5], [0.9])


def test_letters_become_pairs_and_keep_the_chance_of_their_last_letter() -> None:
    translation = ByText(BY_PAIRS, BY_LETTERS)
    tokens = encode_pairs("abcd")
    read = translation.to_draft(tokens)
    assert read == [ord(letter) for letter in "abcd"]
    guess = translation.from_draft(tokens, read, Guessed([ord(letter) for letter in "efgh"], [0.9, 0.8, 0.7, 0.6]))
    assert guess == Guessed(encode_pairs("efgh"), [0.8, 0.6])


def test_pairs_become_letters() -> None:
    translation = ByText(BY_LETTERS, BY_PAIRS)
    tokens = [ord(letter) for letter in "abcd"]
    guess = translation.from_draft(tokens, translation.to_draft(tokens), Guessed(encode_pairs("efgh"), [0.9, 0.5]))
    assert guess == Guessed([ord(letter) for letter in "efgh"], [0.9, 0.9, 0.5, 0.5])


def test_what_would_change_the_last_token_is_no_guess() -> None:
    translation = ByText(BY_PAIRS, BY_LETTERS)
    tokens = encode_pairs("abc")
    read = translation.to_draft(tokens)
    assert translation.from_draft(tokens, read, Guessed([ord("d")], [0.9])) == Guessed([], [])


def test_the_beginning_of_a_character_is_left_out() -> None:
    ours = Coder(lambda text: list(text.encode()), lambda ids: bytes(ids).decode(errors="replace"))
    translation = ByText(ours, BY_LETTERS)
    assert translation.to_draft(list("aé".encode())[:2]) == [ord("a")]
    theirs = ByText(BY_LETTERS, ours)
    assert theirs.from_draft([97], [97], Guessed(list("é".encode())[:1], [0.9])) == Guessed([], [])


def test_other_vocabularies_go_by_text_where_texts_come_back() -> None:
    assert isinstance(between(tiny_tokenizer(), byte_tokenizer(), ("target", "draft")), ByText)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, as GPT-2 writes them."""
    from tokenizers.decoders import ByteLevel as Decoder
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    core = Tokenizer(WordLevel(alphabet, unk_token="!"))
    core.pre_tokenizer = Split("", "isolated")
    from tokenizers.pre_tokenizers import Sequence as Several

    core.pre_tokenizer = Several([ByteLevel(add_prefix_space=False, use_regex=False), Split("", "isolated")])
    core.decoder = Decoder()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def test_a_tokenizer_that_loses_text_is_refused_by_name() -> None:
    with pytest.raises(TargetError, match="lowering can't guess for another vocabulary: of 'Three planets"):
        between(tiny_tokenizer(), letters_tokenizer(lowers=True), ("target", "lowering"))


@pytest.mark.parametrize("missing", [0, 1])
def test_a_model_without_a_tokenizer_is_refused_by_name(missing: int) -> None:
    given = [letters_tokenizer(), letters_tokenizer()]
    given[missing] = None
    with pytest.raises(TargetError, match=f"^{('target', 'draft')[missing]} has no tokenizer"):
        between(*given, ("target", "draft"))
