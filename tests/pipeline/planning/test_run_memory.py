"""What a plan says of memory: what it grows with, and that a run takes what was planned."""

from pathlib import Path

import pytest

from medusa_cli.config.recipe import Recipe
from medusa_cli.pipeline.planning.run_memory import QUANTISED, learning_bytes, model_of
from tests.cli.harness import make_model
from tests.memory_table import arguments, compare
from tests.tiny_folders import tiny_config


def learning(**train: object) -> int:
    recipe = Recipe.model_validate({"train": train, "heads": {"draft_vocab": 100}})
    return learning_bytes(recipe, hidden=64, vocab=1000, parameters=10_000, packed=False)


def test_smaller_pieces_of_a_step_need_less_memory_until_the_heads_themselves_are_most_of_it() -> None:
    whole, half = (
        learning(batch_size=8192, loss_chunk=1),
        learning(batch_size=8192, loss_chunk=1, micro_batch_size=4096),
    )
    # weights, gradients, two moments, the copy that decodes; the rows of the draft vocabulary
    heads = 5 * 10_000 * 4 + 100 * 64 * 4
    assert (half - heads) * 2 - (whole - heads) == pytest.approx(3 * 100 * 4)
    # a checkpoint holds all but the gradients
    assert learning(batch_size=8192, loss_chunk=1, micro_batch_size=1) == heads + 3 * 10_000 * 4
    assert learning(batch_size=64, loss_chunk=1) == learning(batch_size=64, loss_chunk=1, micro_batch_size=9999)


def test_a_tied_output_matrix_is_counted_once_until_it_is_laid_out() -> None:
    tied, own = (model_of(tiny_config(tie_word_embeddings=one)) for one in (True, False))
    assert tied.tied
    assert not own.tied
    assert own.numbers - tied.numbers == tied.output == 97 * 32
    assert tied.laid_out == own.laid_out, "packed, a tied matrix is a copy of the embeddings"
    assert tied.bytes(4, each=QUANTISED["4bit"]) < tied.numbers * 4


def test_a_run_takes_the_memory_that_was_planned(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", hidden_size=512, layers=6, vocab=24_000)
    both = compare(arguments(tmp_path, model))
    assert both.ratio == pytest.approx(1, abs=0.15), (both.plan["memory"], both.taken)
