"""`medusa generate` on a tiny model and heads trained on its own text."""

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa_cli.cli import turns
from tests.cli.harness import Medusa

PROMPT = "Write a story about the sea."
KEYS = [
    "prompt", "text", "token_ids", "prompt_tokens", "completion_tokens", "finish_reason", "num_steps",
    "tokens_per_step", "output_throughput", "duration", "time_to_first_token", "prompt_throughput",
    "generation_throughput", "acceptance", "exact", "drafter", "tree_size", "model", "heads",
    "dtype", "device", "runner", "seed",
]  # fmt: skip


def test_texts_with_heads_are_the_texts_without_in_fewer_steps(generate: Medusa, heads: Path) -> None:
    # The prompts the heads were trained on: a random model's other texts have nothing in common with these.
    prompts = heads / "written" / "prompts.jsonl"
    ours = generate("--prompt-file", prompts, "--json").document
    plain = generate("--prompt-file", prompts, "--json", "--drafter", "none", heads=None).document
    assert [one["token_ids"] for one in ours] == [one["token_ids"] for one in plain]
    assert [one["text"] for one in ours] == [one["text"] for one in plain]
    assert [one["num_steps"] for one in plain] == [one["completion_tokens"] - 1 for one in plain]
    assert sum(one["num_steps"] for one in ours) < sum(one["num_steps"] for one in plain)
    assert {(one["drafter"], one["tree_size"]) for one in ours} == {("medusa", 6)}
    assert {(one["drafter"], one["tree_size"]) for one in plain} == {("none", 0)}


def test_the_document_has_exactly_the_names_of_the_contract(generate: Medusa, tiny: Path, heads: Path) -> None:
    done = generate(PROMPT, "--json", "--seed", 7)
    document = done.document
    assert list(document) == KEYS
    assert (document["model"], document["heads"], document["seed"]) == (str(tiny), str(heads), 7)
    assert (document["dtype"], document["device"], document["acceptance"]) == ("float32", "cpu", "greedy")
    assert document["exact"] is True
    assert document["text"] == decoded(tiny, document["token_ids"])
    assert document["completion_tokens"] == len(document["token_ids"]) == 40
    assert document["tokens_per_step"] == pytest.approx(39 / document["num_steps"])


def test_the_text_goes_to_stdout_and_one_line_about_it_to_stderr(generate: Medusa) -> None:
    text = generate(PROMPT, "--json").document["text"]
    streamed, whole = generate(PROMPT), generate(PROMPT, "--no-stream")
    assert streamed.out == whole.out == text + "\n"
    assert streamed.err.count("\n") == 1
    assert re.fullmatch(
        r"read \d+ tokens in [\d.]+ m?s \([\d,]+/s\), wrote 40 in [\d.]+ m?s \([\d.]+/s\), [\d.]+ a step, length\n",
        streamed.err,
    )
    assert generate(PROMPT, "-q").err == ""


def test_a_stop_string_ends_the_text_before_it_and_all_that_is_counted_with_it(generate: Medusa, tiny: Path) -> None:
    # vllm#47616: ids past the stop remained
    whole = generate(PROMPT, "--json").document
    stops = [whole["text"][place : place + 2] for place in range(1, len(whole["text"]) // 2)]
    stops = [stop for stop in stops if "\ufffd" not in stop]
    for stop in stops[:: len(stops) // 2]:
        cut = generate(PROMPT, "--json", "--stop", stop, "--stop", "never written").document
        ids = cut["token_ids"]
        assert cut["text"] == whole["text"].partition(stop)[0]
        assert cut["finish_reason"] == "stop"
        assert ids == whole["token_ids"][: len(ids)]
        assert stop in decoded(tiny, ids), "the token that completes the stop string belongs to the text"
        assert stop not in decoded(tiny, ids[:-1])
        assert cut["completion_tokens"] == len(ids)
        assert (cut["tokens_per_step"] or 0) * cut["num_steps"] == pytest.approx(len(ids) - 1)
    assert len(ids) < 40
    assert generate(PROMPT, "--stop", stop).out == cut["text"] + "\n"


def test_an_id_that_ends_a_turn_is_no_text_whatever_the_tokenizer_calls_it(
    generate: Medusa, tiny: Path, tmp_path: Path
) -> None:
    ids = generate(PROMPT, "--json", "--drafter", "none", heads=None).document["token_ids"]
    place = next(place for place, token in enumerate(ids) if place > 2 and token not in ids[:place])
    model = Path(shutil.copytree(tiny, tmp_path / "model"))
    settings = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": [1, ids[place]]}))
    ended = generate(PROMPT, "--json", "-m", model, "--drafter", "none", heads=None).document
    assert (ended["token_ids"], ended["finish_reason"]) == (ids[: place + 1], "stop")
    assert ended["text"] == decoded(tiny, ids[:place])
    assert generate(PROMPT, "-m", model, "--drafter", "none", "-q", heads=None).out == ended["text"] + "\n"
    whole = generate(PROMPT, "--json", "-m", model, "--drafter", "none", "--ignore-eos", heads=None).document
    assert whole["text"] == decoded(tiny, ids), "where it ends nothing it is a word like others"


def test_a_stop_that_is_a_special_token_is_taken_as_one(generate: Medusa, tiny: Path) -> None:
    done = generate(PROMPT, "--stop", "x<|im_end|>")
    assert done.code == 1
    assert "the stop string 'x<|im_end|>' holds the special token <|im_end|>" in done.err
    assert generate(PROMPT, "--stop", "<|im_start|>", "-q").code == 0


def test_a_text_that_ends_inside_a_character_is_shown_whole(generate: Medusa, tiny: Path) -> None:
    # TGI#131, #333, vmlx-swift#148: halves of characters shown as they came, or a tail that never came
    ids = generate(PROMPT, "--json").document["token_ids"]
    count = next(count for count in range(39, 1, -1) if decoded(tiny, ids[:count]).endswith("\ufffd"))
    for stream in ("--stream", "--no-stream"):
        assert generate(PROMPT, "-n", count, stream).out == decoded(tiny, ids[:count]) + "\n"


def decoded(model: Path, ids: list[int]) -> str:
    """The text of ids, decoded at once."""
    return AutoTokenizer.from_pretrained(model).decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("flags", [(), ("--min-new-tokens", 9), ("--ignore-eos",)])
def test_a_check_passes_where_the_texts_are_the_same(generate: Medusa, flags: tuple[object, ...]) -> None:
    done = generate(PROMPT, "--check", "--json", *flags)
    assert done.code == 0, done.err
    assert (done.document["identical"], done.document["difference"]) == (True, None)
    assert "checked: 1 of 1 as plain decoding writes" in generate(PROMPT, "--check", *flags).err


@pytest.mark.usefixtures("another_text")
def test_a_check_that_finds_a_mismatch_exits_3_after_the_text(generate: Medusa) -> None:
    done = generate(PROMPT, "--check")
    assert done.code == 3
    assert "the text differs from plain decoding at token 0: the two tokens' logits are" in done.err
    assert "error: the text differs from plain decoding by more than rounding\n hint: " in done.err
    assert done.out


@pytest.mark.usefixtures("another_text")
def test_a_check_that_finds_a_near_tie_says_so_and_passes(generate: Medusa, monkeypatch: pytest.MonkeyPatch) -> None:
    from medusa_cli.decode import exactness

    monkeypatch.setattr(exactness, "near_tie_bound", lambda dtype, scale: 1e9)
    done = generate(PROMPT, "--check", "--json")
    assert done.code == 0
    assert "apart, a near-tie" in done.err
    assert done.document["difference"]["verdict"] == "near-tie"
    assert 0 < done.document["difference"]["margin"] < 1e9


def test_a_dash_reads_the_prompt_from_stdin(generate: Medusa) -> None:
    piped, given = generate("-", "--json", stdin=PROMPT).document, generate(PROMPT, "--json").document
    assert (piped["prompt"], piped["token_ids"]) == (PROMPT, given["token_ids"])


def test_a_file_of_prompts_gives_a_list_of_documents(generate: Medusa, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in (PROMPT, "What is it?")))
    documents = generate("--prompt-file", file, "--json").document
    assert [document["prompt"] for document in documents] == [PROMPT, "What is it?"]
    assert documents[0]["token_ids"] == generate(PROMPT, "--json").document["token_ids"]
    lines = tmp_path / "prompts.txt"
    lines.write_text(f"{PROMPT}\n\nWhat is it?\n")
    texts = [document["text"] for document in documents]
    assert generate("--prompt-file", lines).out == replies((PROMPT, "What is it?"), texts)


def replies(prompts: Sequence[str], texts: Sequence[str]) -> str:
    """Replies as they are shown: each below a line that says whose it is."""
    titles = [turns.title(prompt) for prompt in prompts]
    several = [
        f"--- {n} of {len(texts)}: {title}\n{text}\n"
        for n, (title, text) in enumerate(zip(titles, texts, strict=True), 1)
    ]
    return "\n".join(several)


def test_the_title_of_a_reply_is_one_short_line_that_drives_no_terminal() -> None:
    assert turns.title("What\nis  it?") == "What is it?"
    assert turns.title("a\x1b[31mb\x07") == "a[31mb"
    assert turns.title("x" * 61) == "x" * 59 + "…"


def test_what_is_piped_in_is_the_prompt_without_its_last_line_end(generate: Medusa) -> None:
    given = generate(PROMPT, "--json").document
    for piped in (generate("--json", stdin=f"{PROMPT}\n"), generate("-", "--json", stdin=f"{PROMPT}\r\n")):
        assert (piped.document["prompt"], piped.document["token_ids"]) == (PROMPT, given["token_ids"])


def test_reading_and_writing_are_timed_apart(generate: Medusa) -> None:
    document = generate(PROMPT, "--json").document
    first, whole = document["time_to_first_token"], document["duration"]
    assert 0 < first < whole
    assert document["prompt_throughput"] == pytest.approx(document["prompt_tokens"] / first)
    assert document["generation_throughput"] == pytest.approx(39 / (whole - first))
    alone = generate(PROMPT, "--json", "-n", 1).document
    assert (alone["generation_throughput"], alone["tokens_per_step"]) == (None, None)


def test_a_repetition_penalty_is_generate_s_own_and_the_text_stays_exact(generate: Medusa, tiny: Path) -> None:
    plain = generate(PROMPT, "--json").document
    strict = generate(PROMPT, "--json", "--check", "--repetition-penalty", 1.5)
    assert (strict.code, strict.document["identical"]) == (0, True)
    assert strict.document["token_ids"] == by_library(tiny, repetition_penalty=1.5)
    assert strict.document["token_ids"] != plain["token_ids"]
    assert generate(PROMPT, "--json", "--repetition-penalty", 1).document["token_ids"] == plain["token_ids"]


def by_library(model: Path, **settings: Any) -> list[int]:
    """The new ids that transformers itself writes greedily after the prompt."""
    tokenizer, target = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    whole = target.generate(**asked, do_sample=False, max_new_tokens=40, **settings)
    return whole[0, asked["input_ids"].shape[1] :].tolist()


def test_min_p_of_one_leaves_the_best_token_alone(generate: Medusa) -> None:
    greedy = generate(PROMPT, "--json").document
    sampled = generate(PROMPT, "--json", "--temperature", 2, "--min-p", 1, "--seed", 3).document
    assert sampled["token_ids"] == greedy["token_ids"]
    assert sampled["acceptance"] == "lossless"


def test_a_model_with_a_first_token_of_its_own_starts_from_it(medusa: Medusa, tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"bos_token": "<|im_start|>"}))
    asked = ("generate", "", "--no-chat", "-m", tmp_path / "model", "-n", 4, "--json")
    assert medusa(*asked).document["prompt_tokens"] == 1


def test_a_long_prompt_shows_how_far_it_is_read(generate: Medusa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "LONG_READING", 8)
    assert generate(PROMPT).err.startswith("reading the prompt, tokens\n")
    assert generate(PROMPT, "-q").err == ""


def test_threads_are_those_asked_for(generate: Medusa, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    assert generate(PROMPT, "-n", 2, "--threads", 2).code == 0
    assert (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]) == (2, "2")


def test_a_system_prompt_and_no_template_change_what_is_asked(generate: Medusa) -> None:
    chat, system = generate(PROMPT, "--json").document, generate(PROMPT, "--json", "--system-prompt", "a").document
    bare = generate(PROMPT, "--json", "--no-chat").document
    assert bare["prompt_tokens"] < chat["prompt_tokens"] < system["prompt_tokens"]
    assert bare["prompt"] == PROMPT


def test_the_document_is_also_written_to_a_file(generate: Medusa, tmp_path: Path) -> None:
    done = generate(PROMPT, "--output-json", tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["text"] + "\n" == done.out


def test_a_recipe_file_names_the_model(medusa: Medusa, tiny: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"target: {{model: {tiny}, dtype: float32}}\n")
    assert medusa("generate", PROMPT, "-c", recipe, "-n", 4, "--json").document["model"] == str(tiny)


def test_ends_can_be_put_off_or_ignored(generate: Medusa, tiny: Path, medusa: Medusa, tmp_path: Path) -> None:
    text = generate(PROMPT, "--json").document["token_ids"]
    shutil.copytree(tiny, tmp_path / "model")
    file = tmp_path / "model" / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [text[6]]}))

    def document(*args: object) -> dict[str, Any]:
        options = ("-m", tmp_path / "model", "--dtype", "float32", "-n", 40, "--json")
        return medusa("generate", PROMPT, *options, *args).document

    stopped = document()
    end = text.index(text[6]) + 1
    assert (stopped["token_ids"], stopped["finish_reason"]) == (text[:end], "stop")
    ignored = document("--ignore-eos")
    assert (ignored["token_ids"], ignored["finish_reason"]) == (text, "length")
    later = document("--min-new-tokens", 20)
    assert len(later["token_ids"]) >= 20
    assert text[6] not in later["token_ids"][:20]


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_prompts_written_side_by_side_are_shown_in_their_order(
    generate: Medusa, heads: Path, tmp_path: Path, batch_size: int
) -> None:
    lines = (heads / "written" / "prompts.jsonl").read_text().splitlines()[:5]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    alone = [generate(json.loads(line)["prompt"], "--json").document for line in lines]
    args = ("--prompt-file", tmp_path / "prompts.jsonl", "--batch-size", batch_size)
    documents = generate(*args, "--json", "--check").document
    for found, wanted in zip(documents, alone, strict=True):
        for name in ("prompt", "text", "token_ids", "prompt_tokens", "finish_reason"):
            assert found[name] == wanted[name]
    for stream in ("--stream", "--no-stream"):
        shown = generate(*args, stream)
        assert shown.out == replies([one["prompt"] for one in alone], [one["text"] for one in alone])
        assert re.findall(r"wrote (\d+)", shown.err) == [str(one["completion_tokens"]) for one in alone]


def test_a_prompt_too_long_for_the_model_is_told_before_any_text_is_written(generate: Medusa, tmp_path: Path) -> None:
    # sglang#3574: nothing is written that would then be lost
    (tmp_path / "prompts.txt").write_text(f"sea\n{'long ' * 300}\n")
    refused = generate("--prompt-file", tmp_path / "prompts.txt", "--batch-size", 1)
    assert (refused.code, refused.out) == (1, "")
    assert "error: prompt 2 has " in refused.err
    assert "the model's context holds 256\n hint: shorten the prompt" in refused.err


def test_a_cache_that_can_not_fit_is_refused_before_anything_is_written(generate: Medusa, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("sea\n" * 3)
    import medusa_cli.decode.memory

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(medusa_cli.decode.memory, "free_bytes", lambda device: 1000)
        refused = generate("--prompt-file", tmp_path / "prompts.txt")
    assert (refused.code, refused.out) == (1, "")
    assert "3 texts of up to 128 tokens at once need " in refused.err
    assert refused.err.count(" hint: write fewer at once (--batch-size)") == 1


def test_products_in_integers_give_one_text_with_guesses_and_without(generate: Medusa, heads: Path) -> None:
    prompts = heads / "written" / "prompts.jsonl"
    ours = generate("--prompt-file", prompts, "--json", "--dtype", "int8", "--check").document
    plain = generate("--prompt-file", prompts, "--json", "--dtype", "int8", "--drafter", "none", heads=None).document
    assert [one["token_ids"] for one in ours] == [one["token_ids"] for one in plain]
    assert {(one["dtype"], one["identical"]) for one in ours} == {("int8", True)}


def test_what_can_t_multiply_in_integers_is_refused_in_words(generate: Medusa) -> None:
    for more, said in (
        (["--runner", "eager"], "asks for dtype int8 and for the eager runner, which can't"),
        (["--attention", "eager"], "its attention (eager) has no kernel"),
    ):
        done = generate(PROMPT, "--dtype", "int8", *more)
        assert done.code in (1, 2), done.err
        assert said in " ".join(done.err.split()), done.err
