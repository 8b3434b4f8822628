"""A tokenizer with tokens that the model has no embedding for: told in the same words by every command, and early."""

import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.cli.harness import Medusa, in_two_lines

ARMS = ("greedy", "hf-greedy@float32")


@pytest.fixture
def grown(tiny: Path, tmp_path: Path) -> Path:
    """The tiny model with a tokenizer that was added to."""
    folder = Path(shutil.copytree(tiny, tmp_path / "grown"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<extra {n}>" for n in range(300)])
    tokenizer.save_pretrained(folder)
    return folder


def in_the_template(folder: Path) -> None:
    template = folder / "chat_template.jinja"
    template.write_text("<extra 250>" + template.read_text())


@pytest.mark.parametrize("where", ["prompt", "template"])
@pytest.mark.parametrize(
    "command",
    [
        ("generate", "--prompt-file"),
        *(("bench", "--drafter", "ngram", "--allow-random-prompts", "--compare", arm, "--prompts") for arm in ARMS),
    ],
)
def test_a_prompt_that_the_model_cannot_read_is_told_before_any_is_answered(
    medusa: Medusa, grown: Path, tmp_path: Path, command: tuple[str, ...], where: str
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hi\nTell me of <extra 250> now\n" if where == "prompt" else "Hi\nYou\n")
    if where == "template":
        in_the_template(grown)
    done = medusa(*command, prompts, "-m", grown, "--dtype", "float32", "-n", 4, "-q")
    assert done.code == 1
    assert done.out == ""
    assert in_two_lines(done.err)
    assert "('<extra 250>') is beyond the 304 embeddings of " in done.err
    assert "resize the model's embeddings" in done.err


def test_doctor_looks_at_what_the_template_writes(medusa: Medusa, grown: Path) -> None:
    assert medusa("doctor", grown, "-q").code == 0
    in_the_template(grown)
    done = medusa("doctor", grown, "-q", "--json")
    assert done.code == 1
    assert "('<extra 250>') is beyond the 304 embeddings" in done.document["template_error"]
    assert done.err.count("error: ") == 1
