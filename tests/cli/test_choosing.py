"""Who guesses and what is accepted in `medusa generate`: drafters, trees, sampling, and flags that contradict."""

import json
import re
import shutil
from pathlib import Path

import pytest

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.acceptance.lossless import Lossless
from medusa_cli.acceptance.typical import Typical
from tests.cli.harness import Medusa

PROMPT = "Write a story about the sea."


def test_a_sample_is_the_same_for_the_same_seed_and_another_for_another(generate: Medusa) -> None:
    def sample(seed: int) -> dict:
        return generate(PROMPT, "--json", "--temperature", 1, "--top-p", 0.9, "--top-k", 40, "--seed", seed).document

    first = sample(1)
    assert (first["acceptance"], first["exact"]) == ("lossless", True)
    assert sample(1)["token_ids"] == first["token_ids"]
    assert sample(2)["token_ids"] != first["token_ids"]


@pytest.mark.parametrize("tree", [("--tree", "2x1"), ("--tree-size", 3), ("--tree", "none")])
def test_another_tree_changes_the_steps_and_not_the_text(generate: Medusa, tree: tuple[object, ...]) -> None:
    other, stored = generate(PROMPT, "--json", *tree).document, generate(PROMPT, "--json").document
    assert other["token_ids"] == stored["token_ids"]
    assert other["tree_size"] != stored["tree_size"]


def test_without_heads_it_says_so_and_decodes_plainly(generate: Medusa) -> None:
    done = generate(PROMPT, heads=None)
    assert done.code == 0
    assert "decoding plainly: no heads are known for" in done.err
    assert "decoding plainly: the tree is empty" in generate(PROMPT, "--tree", "none").err


def test_settings_of_sampling_without_a_temperature_are_warned_about(generate: Medusa) -> None:
    assert "warning: --top-p, --top-k and --min-p change nothing" in generate(PROMPT, "--top-p", 0.5).err


@pytest.mark.parametrize(("acceptance", "exact"), [("lossless", True), ("typical", False)])
def test_every_way_of_accepting_runs_and_says_whether_it_is_exact(
    generate: Medusa, acceptance: str, exact: bool
) -> None:
    done = generate(PROMPT, "--json", "--acceptance", acceptance, "--temperature", 0.8)
    assert (done.code, done.document["acceptance"], done.document["exact"]) == (0, acceptance, exact)
    assert ("typical acceptance is not exact" in done.err) is not exact


def test_the_help_says_which_ways_of_accepting_are_exact(medusa: Medusa) -> None:
    # whisper-medusa#24: read as lossless, and was not
    help_text = " ".join(medusa("generate", "--help").out.split())
    (flag,) = re.findall(r"--acceptance <([a-z|]+)> (.*?) --", help_text)
    assert flag[0].split("|") == ["greedy", "lossless", "typical"]
    rules = {"greedy": Greedy(), "lossless": Lossless(1.0, 1.0, 0), "typical": Typical(1.0)}
    exact = [name for name, rule in rules.items() if rule.exact]
    assert flag[1].startswith(f"{' and '.join(exact)} are exact: ")
    assert ". typical is not: " in flag[1]


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("--acceptance", "typical"), 1, "typical acceptance samples, at a temperature above 0"),
        (("--posterior-alpha", 0.5), 1, "belong to typical acceptance"),
        (("--posterior-threshold", 1.5), 2, "--posterior-threshold is a probability"),
        (("--posterior-alpha", "nan"), 2, "--posterior-alpha is a factor above 0"),
        (("--acceptance", "greedy", "--temperature", 1), 1, "greedy acceptance has no temperature"),
    ],
)
def test_flags_that_contradict_each_other_are_told(
    generate: Medusa, args: tuple[object, ...], code: int, said: str
) -> None:
    done = generate(PROMPT, *args)
    assert done.code == code
    assert said in done.err


def test_what_the_model_s_settings_ask_for_is_followed_and_said(
    medusa: Medusa, tiny: Path, heads: Path, tmp_path: Path
) -> None:
    # EAGLE#178: the baseline followed them, and decoding with guesses did not
    shutil.copytree(tiny, tmp_path / "model")
    file = tmp_path / "model" / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"repetition_penalty": 1.5, "top_p": 0.4}))

    def written(model: Path, *args: object) -> tuple[str, str]:
        done = medusa("generate", PROMPT, "-m", model, "--dtype", "float32", "-n", 24, *args)
        assert done.code == 0, done.err
        return done.out, done.err

    text, said = written(tmp_path / "model")
    assert "as the model's generation_config says: repetition_penalty 1.5\n" in said
    assert text != written(tiny)[0]
    for guesses in (("--speculate", "on"), ("--drafter", "mixed")):
        assert written(tmp_path / "model", "--heads", heads, *guesses)[0] == text
    text, said = written(tmp_path / "model", "--temperature", 0.9)
    assert "says: repetition_penalty 1.5, top_p 0.4\n" in said
    text, said = written(tmp_path / "model", "--temperature", 0.9, "--top-p", 0.9)
    assert "says: repetition_penalty 1.5\n" in said
    file.write_text(json.dumps(json.loads(file.read_text()) | {"guidance_scale": 2.0}))
    refused = medusa("generate", PROMPT, "-m", tmp_path / "model")
    assert (refused.code, refused.err.count(" hint: ")) == (1, 1)
    assert "asks for guidance_scale, which can't be followed in a tree" in refused.err


def test_the_name_of_a_model_chooses_neither_heads_nor_tree(generate: Medusa, tiny: Path, tmp_path: Path) -> None:
    # Medusa#63: without "vicuna" in the name it warned, and took the tree of a model of 7 billion numbers
    named = shutil.copytree(tiny, tmp_path / "vicuna-7b-v1.3")
    there, here = generate(PROMPT, "-q", "--json", "-m", named), generate(PROMPT, "-q", "--json")
    assert there.err == here.err == ""
    for key in ("tree_size", "token_ids", "num_steps", "heads"):
        assert there.document[key] == here.document[key]
    alone = generate(PROMPT, "--json", "-m", named, "--speculate", "auto", heads=None)
    assert (alone.document["drafter"], alone.document["heads"]) == ("none", None)


@pytest.mark.parametrize("speculate", ["auto", "on", "off"])
@pytest.mark.parametrize("drafter", ["medusa", "ngram", "mixed"])
def test_every_drafter_writes_the_same_text(generate: Medusa, heads: Path, drafter: str, speculate: str) -> None:
    named = None if drafter == "ngram" else heads
    plain = generate(PROMPT, "--json", "--drafter", "none", heads=None).document
    done = generate(PROMPT, "--json", "--drafter", drafter, "--speculate", speculate, heads=named)
    assert done.document["token_ids"] == plain["token_ids"]
    assert done.document["drafter"] == ("none" if speculate == "off" else drafter)
    assert (done.document["heads"] is None) == (speculate == "off" or drafter == "ngram")


def test_n_grams_copy_what_the_prompt_holds(generate: Medusa) -> None:
    loop = "one two three four five six seven eight nine ten " * 4
    done = generate(loop, "--no-chat", "--json", "--drafter", "ngram", heads=None)
    assert done.code == 0, done.err
    assert done.document["tree_size"] > 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--drafter", "ngram", "--tree", "chain:2"), "finds a tree of its own"),
        (("--drafter", "mixed", "--tree", "chain:2"), "finds a tree of its own"),
        (("--drafter", "ngram"), "needs no heads"),
    ],
)
def test_flags_that_a_drafter_has_no_use_for_are_refused(generate: Medusa, flags: tuple[str, ...], said: str) -> None:
    done = generate(PROMPT, *flags)
    assert done.code == 1
    assert said in done.err


@pytest.mark.parametrize("flags", [("--min-p", 0), ("--min-p", 1.5), ("--min-p", "nan"), ("--repetition-penalty", 0)])
def test_a_share_or_a_factor_that_means_nothing_is_a_usage_error(flags: tuple[object, ...], medusa: Medusa) -> None:
    refused = medusa("generate", "Hi", "-m", "/no/such/model", "--temperature", 1, *flags)
    assert refused.code == 2
    assert f"{flags[0]} is a " in refused.err
