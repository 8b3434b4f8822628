"""A model whose numbers are not finite: every command ends with the place, none with a text or with "identical"."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tests.cli.harness import Done, Medusa, in_two_lines, train_args


@pytest.fixture
def broken(tiny: Path, tmp_path: Path) -> Path:
    """The tiny model with one embedding that is no number: that of `q`, which the self-check's texts don't hold."""
    folder = Path(shutil.copytree(tiny, tmp_path / "broken"))
    tensors = load_file(folder / "model.safetensors")
    [token] = AutoTokenizer.from_pretrained(tiny)("q", add_special_tokens=False)["input_ids"]
    tensors["model.embed_tokens.weight"][token] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def assert_named(done: Done) -> None:
    assert done.code == 1, done.err
    assert in_two_lines(done.err), done.err
    assert "are not finite in float32: text 1, after " in done.err
    assert "model.embed_tokens is the first" in done.err
    assert "same" not in done.out


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--drafter", "ngram", "--speculate", "on", "--check"),
        ("--temperature", "0.8", "--top-p", "0.9"),
        ("--temperature", "0.8", "--acceptance", "typical"),
    ],
)
def test_generate_names_the_place(medusa: Medusa, broken: Path, more: tuple[str, ...]) -> None:
    assert_named(medusa("generate", "a q", "-m", broken, "--dtype", "float32", "-n", 8, "-q", *more))


def test_a_bench_of_broken_numbers_finds_nothing_the_same(medusa: Medusa, broken: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a q\n")
    arms = ("--drafter", "ngram", "--compare", "greedy,hf-greedy@float32")
    more = ("--prompts", prompts, "--allow-random-prompts", "-n", 8)
    assert_named(medusa("bench", "-m", broken, "--dtype", "float32", "-q", *arms, *more))


def test_the_data_stage_writes_no_broken_text(medusa: Medusa, broken: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a q"}\n' * 4)
    done = medusa(*train_args(broken, tmp_path / "run", "--dataset", prompts, "--answers-from", "self", "-q"))
    assert done.code == 1, done.err
    assert "are not finite in float32: text " in done.err
