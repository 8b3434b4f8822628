"""Tokenizers of the kinds that there are, small, and ids that arrive in steps."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

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
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁etaoncs", "▁the", "▁cat"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "c"), ("▁", "s"), ("▁c", "a"), ("▁ca", "t")]
    pieces += ["▁s", "\ufffd", "▁\ufffd", "▁t", "h", "▁th", "▁c", "▁ca"]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    inner = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@functools.cache
def spelling_bytes_out() -> PreTrainedTokenizerFast:
    """A vocabulary with the names of bytes in it, and a decoder that doesn't join them."""
    words = {word: index for index, word in enumerate(["<unk>", "a", *(f"<0x{byte:02X}>" for byte in range(256))])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


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


@contextmanager
def counted(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many ids each call of the tokenizer's `decode` was given."""
    decoded: list[int] = []
    decode = tokenizer.decode

    def noted(ids: list[int], **options: Any) -> str:
        decoded.append(len(ids))
        return decode(ids, **options)

    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "decode", noted)
        yield decoded
