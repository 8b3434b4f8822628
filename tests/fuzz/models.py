"""Files of models: their folders, and GGUF files."""

import json
from collections.abc import Mapping
from pathlib import Path

from tests.cli.harness import make_model
from tests.fuzz.kind import QUICK, Kind, run
from tests.tiny_folders import save_gguf

PROMPT = "Hi"


def generate(folder: Path, *more: object) -> list[object]:
    return ["generate", PROMPT, "-m", folder, *QUICK, *more]


def of_a_model(victims: Mapping[str, str]) -> Kind:
    """A file of a model's folder."""
    return Kind(
        make=make_folder,
        victims=victims,
        read=lambda folder, _: run(*generate(folder)),
        command=lambda folder, _: generate(folder),
    )


GENERATION = {
    "eos_token_id": [1, 290], "pad_token_id": 2, "do_sample": True, "temperature": 0.9, "top_p": 0.9, "top_k": 50,
    "repetition_penalty": 1.1, "no_repeat_ngram_size": 3, "bad_words_ids": [[280], [281, 3]], "suppress_tokens": [7],
    "begin_suppress_tokens": [8], "sequence_bias": [[[9], -1.0]], "min_length": 1, "max_length": 90,
    "exponential_decay_length_penalty": [50, 1.1], "forced_bos_token_id": None, "transformers_version": "5.24.0",
}  # fmt: skip


def make_folder(folder: Path) -> None:
    make_model(folder, layers=1)
    # settings that change nothing here, so that there is something to damage
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))


def make_gguf(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_gguf(folder / "model.gguf")


def of_a_gguf(folder: Path, _: str) -> list[object]:
    return ["generate", "w1 1", "-m", folder / "model.gguf", *QUICK]
