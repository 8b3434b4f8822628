"""What a stream tells of its steps: whose words they are, the trees that were verified, nothing that is held back."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from medusa_cli.decode.drafted import Verified
from medusa_cli.decode.text import TextStream
from medusa_cli.serve.steps import StepTeller
from medusa_cli.serve.worker import News
from tests.fakes import SHAPES, RandomDrafter
from tests.serve.conftest import Served, serving
from tests.serve.test_api import CHAT, GO, HI, WORDS, chat_ids, events

STEPS = {"stream": True, "stream_options": {"include_steps": True, "include_usage": True}}
LONG = {"max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def guessed(served: Served) -> Iterator[Served]:
    """A server whose guesses are often right: paths of many forms are kept."""
    prompts = [chat_ids(served), [5, 6, 7]]
    asked = [GO | LONG | {"prompt": prompt, "logprobs": 0, "ignore_eos": True} for prompt in prompts]
    answers = [served.post(WORDS, each).json()["choices"][0]["logprobs"]["tokens"] for each in asked]
    texts = [
        [*prompt, *(int(word.removeprefix("w")) for word in words)]
        for prompt, words in zip(prompts, answers, strict=True)
    ]
    with serving(target=served.target, drafter=RandomDrafter(texts, SHAPES["wide"])) as found:
        yield found


def told(served: Served, path: str, asked: dict[str, Any]) -> tuple[list[Any], str, Any]:
    """The steps of the first choice, its text, and the last chunk; no step is told before its words are."""
    text, steps, chunks = "", list[Any](), events(served.post(path, asked | STEPS).text)
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == 0:
                text += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
                steps += choice["steps"]
                assert text.startswith(joined(steps))
    return steps, text, chunks[-1]


def joined(steps: Sequence[Any]) -> str:
    return "".join(token["text"] for step in steps for token in step["tokens"])


def ids_in(steps: Sequence[Any]) -> list[int]:
    return [token["id"] for step in steps for token in step["tokens"]]


@pytest.mark.parametrize(("path", "asked"), [(CHAT, HI | LONG), (WORDS, GO | LONG), (WORDS, GO | {"n": 2})])
def test_steps_join_to_the_text_and_add_up(guessed: Served, path: str, asked: dict[str, Any]) -> None:
    steps, text, last = told(guessed, path, asked)
    assert joined(steps) == text
    assert all(step["guessed"] == max(0, len(step["tokens"]) - 1) for step in steps)
    if asked.get("n", 1) == 1:
        speculation = last["speculation"]
        assert len(steps) == speculation["num_steps"] + 1, "the prompt's reading brings a token too"
        assert sum(step["guessed"] for step in steps) == speculation["num_accepted_tokens"] > 0
        assert len(ids_in(steps)) == last["usage"]["completion_tokens"]


def test_the_kept_path_of_a_tree_is_what_its_step_brought(guessed: Served) -> None:
    steps, _, last = told(guessed, CHAT, HI | LONG)
    before: int | None = None
    trees = 0
    for step in steps:
        ids, tree = [token["id"] for token in step["tokens"]], step["tree"]
        if tree is not None:
            trees += 1
            parents, kept = tree["parents"], tree["kept"]
            assert parents[0] == -1
            assert all(parent < node for node, parent in enumerate(parents))
            assert [parents[node] for node in kept] == [-1, *kept[:-1]], "a path from the root down"
            assert tree["ids"][0] == before, "the root is the token before"
            assert [tree["ids"][node] for node in kept[1:]] == ids[:-1]
            assert tree["texts"] == [f"w{token}" for token in tree["ids"]]
        before = ids[-1]
    assert trees > 2
    assert last["speculation"]["num_draft_tokens"] >= sum(
        len(step["tree"]["ids"]) - 1 for step in steps if step["tree"]
    )


def test_without_guesses_each_step_is_a_token_and_no_tree(guessed: Served) -> None:
    steps, text, _ = told(guessed, CHAT, HI | LONG | {"speculate": False})
    assert joined(steps) == text
    assert {(len(step["tokens"]), step["guessed"], step["tree"]) for step in steps} == {(1, 0, None)}


def test_steps_are_told_to_those_alone_who_ask(guessed: Served) -> None:
    for chunk in events(guessed.post(CHAT, HI | {"stream": True}).text):
        assert "steps" not in chunk["choices"][0]
    refused = guessed.post(CHAT, HI | {"stream_options": {"include_steps": True}})
    assert refused.status_code == 400


def test_a_stop_string_is_told_in_no_step(guessed: Served) -> None:
    """Two words are the stop: the first may have come long before it is known whether the text ends there."""
    free, _, _ = told(guessed, WORDS, GO | LONG)
    words = [f"w{token}" for token in ids_in(free)]
    lost_guesses = 0
    for place in range(1, len(words) - 2):
        stop = " ".join(words[place : place + 2])
        if "w2" in stop or "w0" in stop:  # names of special tokens, which are no text
            continue
        steps, text, last = told(guessed, WORDS, GO | LONG | {"stop": [stop]})
        assert stop not in text
        assert joined(steps) == text.rstrip(), "whole tokens alone: a space before the stop string is text too"
        assert last["usage"]["completion_tokens"] >= len(ids_in(steps)) + 2, "those of the stop string are missing"
        assert len(steps) == last["speculation"]["num_steps"] + 1
        shown = [[step["tree"]["texts"][node] for node in step["tree"]["kept"]] for step in steps if step["tree"]]
        assert stop not in " ".join(word for path in shown for word in path[1:])
        assert steps[-1]["tree"] is None
        lost_guesses += last["speculation"]["num_accepted_tokens"] - sum(step["guessed"] for step in steps)
    assert lost_guesses > 3, "a guess that was right is held back too"


# --- where tokens cut characters ---


@pytest.fixture(scope="module")
def bytewise() -> PreTrainedTokenizerFast:
    """Each byte is a token of its own; so is a b with the first byte of an emoji."""
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "bð"]
    core = Tokenizer(BPE({letter: number for number, letter in enumerate(letters)}, [("b", "ð")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def test_the_bytes_of_a_character_are_told_once_it_is_whole(bytewise: PreTrainedTokenizerFast) -> None:
    ids = bytewise("a🙂b")["input_ids"]
    teller, sent = StepTeller(TextStream(bytewise)), [1, 1, 1, 1, 2, 3]
    found = []
    for token, length in zip(ids, sent, strict=True):
        teller.saw(News(0, [token]))
        found.append([joined([step]) for step in teller.tell(length, str, is_over=False)])
    assert found == [["a"], [], [], [], ["", "", "", "🙂"], ["b"]]


def test_bytes_that_begin_a_stop_string_are_never_told(bytewise: PreTrainedTokenizerFast) -> None:
    ids = bytewise("a🙂")["input_ids"]
    teller, words = StepTeller(TextStream(bytewise)), TextStream(bytewise, ["🙂"])
    teller.saw(News(0, ids[:3], tree=Verified([-1, 0], [9, ids[0]], [0, 1])))
    length = len(words.feed(ids[:3]))
    assert length == 1
    assert teller.tell(length, str, is_over=False) == []
    teller.saw(News(0, ids[3:], "stop"))
    assert words.feed(ids[3:]) == ""
    cut, lost = teller.tell(length, str, is_over=True)
    assert cut == {"tokens": [{"id": ids[0], "text": "a"}], "guessed": 1, "tree": None}
    assert lost["tokens"] == []


def test_a_character_that_is_never_finished_is_told_at_the_end(bytewise: PreTrainedTokenizerFast) -> None:
    teller, words = StepTeller(TextStream(bytewise)), TextStream(bytewise)
    ids = bytewise("a🙂")["input_ids"][:3]
    teller.saw(News(0, ids, "length"))
    text = words.feed(ids) + words.flush()
    (step,) = teller.tell(len(text), str, is_over=True)
    assert joined([step]) == text == "a\ufffd"


def test_a_token_that_ends_within_a_character_waits_for_the_rest_of_it(bytewise: PreTrainedTokenizerFast) -> None:
    ids = bytewise("b🙂")["input_ids"]
    assert len(ids) == 4, "the b and a byte are one token"
    teller = StepTeller(TextStream(bytewise))
    teller.saw(News(0, ids[:1]))
    assert teller.tell(1, str, is_over=False) == []
    teller.saw(News(0, ids[1:]))
    assert [joined([step]) for step in teller.tell(2, str, is_over=False)] == ["b", "🙂"]
