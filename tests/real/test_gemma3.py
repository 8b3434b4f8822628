"""Gemma-3-270M, whose layers take turns between a window of 512 tokens and all of them, past that window.

Opt-in, since its terms forbid shipping it: MEDUSA_TEST_GEMMA3 names the GGUF file (about 250 MB; 10 minutes and 8 GiB).
"""

import os
import random

import pytest

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.config.recipe import TargetSettings
from medusa_cli.decode.loop import Parts, collect
from medusa_cli.decode.rows import Limits
from medusa_cli.drafters.none import NoDrafter
from medusa_cli.model.loading.load import load_target
from tests.fakes import SHAPES, RandomDrafter
from tests.tiny_models import greedy_of

FILE = os.environ.get("MEDUSA_TEST_GEMMA3")
WINDOW, NUM_NEW = 512, 24

pytestmark = pytest.mark.skipif(not FILE, reason="MEDUSA_TEST_GEMMA3 names no file")


@pytest.mark.parametrize("length", [WINDOW - 10, WINDOW + 90])
def test_texts_across_and_past_the_window_are_the_greedy_ones(length: int) -> None:
    settings = TargetSettings(model=str(FILE), dtype="float32", device="cpu")
    target = load_target(settings)
    stock = load_target(settings.model_copy(update={"runner": "eager", "attention": "sdpa"})).model
    words = random.Random(length).choices(["river", "stone", "light", "seven", "of", "the", "and", "was"], k=2 * length)
    prompt = target.tokenizer(" ".join(words))["input_ids"][:length]
    assert len(prompt) == length
    wanted = greedy_of(stock, prompt, NUM_NEW + 8)
    knowing = RandomDrafter([prompt + wanted], SHAPES["wide"])
    knowing.vocab_size = target.vocab_size
    for drafter in (knowing, NoDrafter()):
        (found,) = collect(Parts(target, drafter, Greedy()), [prompt], Limits(NUM_NEW))
        assert found.token_ids == wanted[:NUM_NEW]
        assert found.num_steps < NUM_NEW or isinstance(drafter, NoDrafter)
