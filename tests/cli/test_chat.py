"""`medusa chat` with turns from a pipe: its replies, its commands, and what it says of mistakes."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers

from medusa_cli.data.conversations import Counts, read_conversations
from medusa_cli.data.prompts import read_prompts
from tests.cli.harness import Done, Medusa, in_two_lines, make_model
from tests.tiny_folders import save_tiny

Messages = list[dict[str, str]]
NEW = 10


@pytest.fixture
def chat(medusa: Medusa, tiny: Path) -> Medusa:
    def run(*args: object, stdin: str | bytes = "", model: Path = tiny) -> Done:
        return medusa("chat", "-m", model, "--dtype", "float32", "-n", NEW, *args, stdin=stdin)

    return run


@pytest.fixture(scope="module")
def plain(tiny: Path) -> Callable[[Sequence[dict[str, str]]], str]:
    """What transformers writes greedily after these messages."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)

    def write(messages: Sequence[dict[str, str]]) -> str:
        asked = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = model.generate(**asked, do_sample=False, max_new_tokens=NEW)[0, asked["input_ids"].shape[1] :]
        return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    return write


def asked(messages: Messages) -> Iterator[Messages]:
    """What came before each reply."""
    return (messages[:place] for place, one in enumerate(messages) if one["role"] == "assistant")


@pytest.mark.parametrize("flags", [(), ("--drafter", "suffix", "--speculate", "on"), ("--drafter", "none")])
def test_each_reply_is_the_plain_greedy_text_after_all_that_was_said(
    chat: Medusa, plain: Callable[[Sequence[dict[str, str]]], str], flags: Sequence[str]
) -> None:
    done = chat("--json", "--system-prompt", "What is it?", *flags, stdin="the sea\nWrite a story\nuser assistant\n")
    assert done.code == 0, done.err
    messages = done.document["messages"]
    assert [one["role"] for one in messages] == ["system", *["user", "assistant"] * 3]
    for before in asked(messages):
        assert messages[len(before)]["content"] == plain(before)
    assert [one["text"] for one in done.document["replies"]] == [one["content"] for one in messages[2::2]]


def test_replies_go_to_stdout_and_what_they_took_to_stderr(chat: Medusa) -> None:
    told = chat("--json", stdin="the sea\n").document["replies"]
    done = chat(stdin="\nthe sea\n")
    assert done.code == 0
    assert done.out == told[0]["text"] + "\n"
    assert f"{told[0]['completion_tokens']} tokens, " in done.err
    assert "first after" in done.err
    assert chat("-q", stdin="the sea\n").err == ""


def test_heads_make_it_take_fewer_steps(chat: Medusa, heads: Path) -> None:
    one, other = (
        chat("--json", "--ignore-eos", "-n", 40, "--speculate", "on", *flags, stdin="What is it?\n").document
        for flags in (("--heads", heads), ("--drafter", "none"))
    )
    assert one["messages"] == other["messages"]
    assert one["replies"][0]["num_steps"] < other["replies"][0]["num_steps"] == 39
    assert one["replies"][0]["tokens_per_step"] > other["replies"][0]["tokens_per_step"] == 1
    assert (one["drafter"], other["drafter"]) == ("medusa", "none")


def test_a_turn_may_have_several_lines(chat: Medusa) -> None:
    stdin = 'one \\\ntwo\n"""\nthree\n/four\n"""\n"""five"""\n//six\n'
    messages = chat("--json", stdin=stdin).document["messages"]
    assert [one["content"] for one in messages if one["role"] == "user"] == [
        "one \ntwo",
        "three\n/four",
        "five",
        "/six",
    ]


def test_what_was_saved_is_loaded_trained_on_and_asked(chat: Medusa, tmp_path: Path) -> None:
    file = tmp_path / "talk.jsonl"
    first = chat("--json", "--system-prompt", "sea", stdin=f"the sea\nit is ä\n/save {file}\n")
    assert first.code == 0, first.err
    (read,) = read_conversations(str(file), split="train", counts=Counts(), on_bad_row="fail")
    said = first.document["messages"]
    assert [(one.role, one.content) for one in read.messages] == [(one["role"], one["content"]) for one in said]
    assert [one.content for one in read_prompts(file)[0].messages] == [one["content"] for one in said[:-1]]
    second = chat("--json", stdin=f"/load {file}\nWhat is it?\n").document["messages"]
    assert second[:5] == said
    straight = chat("--json", "--system-prompt", "sea", stdin="the sea\nit is ä\nWhat is it?\n").document
    assert second == straight["messages"]


def test_a_file_of_something_else_is_written_over_when_that_is_asked_for(chat: Medusa, tmp_path: Path) -> None:
    file = tmp_path / "talk.jsonl"
    file.write_text("mine")
    done = chat(stdin=f"the sea\n/save {file}\n")
    assert (done.code, file.read_text()) == (1, "mine")
    assert f"error: {file} is there already\n hint: /save! {file} writes over it\n" in done.err
    # once it is the conversation's own, it is written anew without asking, and the name needn't be said again
    done = chat("--json", stdin=f"the sea\n/save! {file}\nit is\n/save {file}\nuser\n/save\n")
    assert done.code == 0, done.err
    assert json.loads(file.read_text())["messages"] == done.document["messages"]


def test_a_question_at_the_end_of_a_file_waits_to_be_asked(chat: Medusa, tmp_path: Path) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_text('{"prompt": "the sea"}\n')
    done = chat("--json", stdin=f"/load {file}\n/retry\n")
    assert "its last question has no answer yet" in done.err
    assert done.document["messages"] == chat("--json", stdin="the sea\n").document["messages"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "no such file"),
        ("no json\n", "broken JSON"),
        ('{"messages": [{"role": "assistant", "content": "Hi"}]}\n', "the assistant speaks first"),
        ('{"prompt": "a", "response": "b"}\n' * 2, "holds 2 conversations"),
        ('{"text": "the sea"}\n', "plain text and no conversation"),
        ("", "0 usable rows"),
    ],
)
def test_what_is_no_conversation_is_not_loaded(chat: Medusa, tmp_path: Path, content: str | None, told: str) -> None:
    file = tmp_path / "talk.jsonl"
    if content is not None:
        file.write_text(content)
    done = chat("--output-json", tmp_path / "out.json", stdin=f"the sea\n/load {file}\n")
    assert done.code == 1
    assert told in done.err
    assert in_two_lines(done.err)
    assert len(json.loads((tmp_path / "out.json").read_text())["messages"]) == 2, "what was said is still there"


def test_reset_forgets_all_but_the_system_message(chat: Medusa) -> None:
    done = chat("--json", "--system-prompt", "sea", stdin="it is\n/reset\nthe sea\n")
    assert done.document["messages"] == chat("--json", "--system-prompt", "sea", stdin="the sea\n").document["messages"]
    assert len(done.document["replies"]) == 2


def test_the_system_message_is_set_shown_and_removed(chat: Medusa) -> None:
    done = chat(stdin="/system\n/system the sea\n/system\n/system -\n/system\n")
    assert done.out == "there is no system message\nthe sea\nthere is no system message\n"


def test_settings_hold_from_the_next_reply_on(chat: Medusa) -> None:
    stdin = "the sea\n/set max-new-tokens 3\n/set ignore-eos true\nit is\n/set stop e\n/set\n"
    done = chat("--output-json", "/dev/null", "--verbose", stdin=stdin)
    assert done.code == 0, done.err
    assert "max-new-tokens       3\n" in done.out
    assert "ignore-eos           True\n" in done.out
    assert "3 tokens" in done.err
    assert "cut off, /set max-new-tokens N allows more" in done.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("temperature", "requires an argument"),
        ("temperature hot", "should be a valid number"),
        ("temperature -1", "greater than or equal to 0"),
        ("temperature 1e-9", "too close to 0"),
        ("top-p 2", "--top-p is a share"),
        ("max-new-tokens 0", "greater than or equal to 1"),
        ("tempature 1", "did you mean temperature?"),
        ("ignore-eos perhaps", "ignore-eos is true or false"),
        ("acceptance typical", "typical acceptance samples"),
        ("acceptance best", "best"),
        ("seed 1", "there is no setting seed"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(chat: Medusa, words: str, told: str) -> None:
    done = chat(stdin=f"/set {words}\n")
    assert done.code == 1
    assert told in done.err
    assert in_two_lines(done.err)


def test_what_is_drawn_depends_on_the_seed_and_on_the_replies_before(chat: Medusa) -> None:
    stdin = "the sea\n/retry\n/retry\n"
    flags = ("--json", "--temperature", 1.5, "--ignore-eos")
    one, same, other = (chat(*flags, "--seed", seed, stdin=stdin).document["replies"] for seed in (1, 1, 2))
    texts = [reply["text"] for reply in one]
    assert texts == [reply["text"] for reply in same]
    assert texts != [reply["text"] for reply in other]
    assert len(set(texts)) == 3, "asked again, it draws again"


def test_stats_add_up(chat: Medusa) -> None:
    done = chat("--ignore-eos", stdin="the sea\nit is\n/stats\n")
    assert f"replies 2, tokens {2 * NEW}, " in done.out
    assert "tokens a step" in done.out
    assert " of 256 tokens" in done.out


def test_help_names_every_command(chat: Medusa) -> None:
    from medusa_cli.cli.chatting.commands import names

    done = chat(stdin="/help\n")
    assert done.code == 0
    assert all(f"{name} " in done.out for name in names())


@pytest.mark.parametrize(
    ("stdin", "told"),
    [
        ("/resett\n", "did you mean /reset?"),
        ("/\n", "there is no command /"),
        ("/usr/bin/env what is it\n", "a turn that begins with / needs //"),
        ("/reset now\n", "/reset takes no words"),
        ("/save\n", "/save needs the name of a file"),
        ("/save talk.jsonl\n", "nothing to save"),
        ("the sea\n/save talk.txt\n", "is no .jsonl file"),
        ("the sea\n/save nowhere/at/all.jsonl\n", "can't write"),
        ("/load\n", "/load needs the name of a file"),
        ("/retry\n", "nothing has been asked yet"),
        ('"""\nhello\n', "doesn't end"),
        (b"\xff\xfe\n", "stdin is not UTF-8"),
    ],
)
def test_a_mistake_in_a_pipe_ends_the_conversation(
    chat: Medusa, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stdin: str | bytes, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = chat(stdin=stdin)
    assert done.code == 1
    assert told in done.err
    assert in_two_lines(done.err)
    assert not any(tmp_path.iterdir())


def test_a_full_context_is_told_and_loses_nothing(chat: Medusa, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = chat("--output-json", out, "--ignore-eos", stdin="the sea\n" + "it is " * 200 + "\nthe sea\n")
    assert done.code == 1
    assert in_two_lines(done.err)
    assert "the context is full: the conversation has " in done.err
    assert "holds 256" in done.err
    assert [one["content"] for one in json.loads(out.read_text())["messages"]][:1] == ["the sea"]
    assert [one["finish_reason"] for one in json.loads(out.read_text())["replies"]] == ["length", "error"]
    done = chat("--ignore-eos", "-n", 999, stdin="the sea\n")
    assert done.code == 0
    assert "cut off, the context is full" in done.err


def test_models_that_can_not_be_talked_with_are_told_before_the_first_turn(chat: Medusa, tmp_path: Path) -> None:
    bare = chat(model=save_tiny(tmp_path / "bare"), stdin="w5\n")
    assert (bare.code, bare.out) == (1, "")
    assert "has no chat template" in bare.err
    folder = make_model(tmp_path / "strict")
    (folder / "chat_template.jinja").write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    strict = chat("--system-prompt", "sea", model=folder, stdin="the sea\n")
    assert (strict.code, strict.out) == (1, "")
    assert "no system" in strict.err


@pytest.mark.parametrize(
    ("flags", "code", "told"),
    [
        (("--temperature", "-1"), 2, "--temperature"),
        (("--top-p", "0"), 2, "--top-p is a share"),
        (("--stop", ""), 2, "--stop needs some text"),
        (("--acceptance", "lossless"), 1, "lossless acceptance samples"),
        (("--drafter", "model"), 1, "needs a model that guesses"),
        (("--api-key", "secret"), 2, "--api-key is for --url"),
        (("--url", "http://127.0.0.1:9", "--drafter", "none"), 2, "--drafter, --dtype: a server has its own"),
    ],
)
def test_flags_that_make_no_sense_are_refused(
    chat: Medusa, monkeypatch: pytest.MonkeyPatch, flags: Sequence[str], code: int, told: str
) -> None:
    monkeypatch.delenv("MEDUSA_API_KEY", raising=False)
    done = chat(*flags, stdin="the sea\n")
    assert (done.code, done.out) == (code, "")
    assert told in " ".join(done.err.split())
    assert "secret" not in done.err


def test_an_empty_pipe_is_an_empty_conversation(chat: Medusa) -> None:
    document: dict[str, Any] = chat("--json").document
    assert document["messages"] == document["replies"] == []
    assert document["drafter"] == "none"
