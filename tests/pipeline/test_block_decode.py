"""What block heads have learnt is what is served: decodes keep what a replay of the known texts says."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from medusa_cli.config.recipe import Recipe, TrainSettings
from medusa_cli.heads.block import BlockHeads
from medusa_cli.model.target import Target
from medusa_cli.pipeline import decode_eval as module
from medusa_cli.pipeline.decode_eval import Probe
from medusa_cli.pipeline.run import fresh_heads
from medusa_cli.train.checkpoint import Checkpoints, RunIdentity, TrainLog
from medusa_cli.train.corpus import Corpus
from medusa_cli.train.events import Outlets
from medusa_cli.train.loop import Sets, train
from medusa_cli.train.store import Sample
from medusa_cli.train.text_examples import evened, examples_of
from tests.tiny_models import VOCAB, counting_model, greedy_of, prompt_of, target_of

PLACES, NEW = 3, 40
PROMPTS = [prompt_of(length, seed) for seed, length in enumerate((5, 9, 7, 12))]


def sample(target: Target, taps: tuple[int, ...], prompt: list[int]) -> Sample:
    ids = prompt + greedy_of(target.model, prompt, NEW)
    states = target.states([ids], taps=taps)
    assert states.taps_BNLH is not None
    asked = [False] * len(prompt) + [True] * NEW
    return Sample(str(prompt), ids, states.hidden_BNH[0], asked, evened(states.taps_BNLH[0]))


def replayed(heads: BlockHeads, target: Target) -> float:
    """Tokens a step of a chain: at each root the guesses that are right, one after the other, as training sees."""
    steps = tokens = 0
    for prompt in PROMPTS:
        found = sample(target, heads.config.wanted_taps, prompt)
        examples = examples_of(Corpus.from_samples([found]), [0], heads.draft_ids, heads.config)
        rows = np.arange(len(examples))
        # each place in view of the true tokens: a guess counts only where those before it were right
        guesses_NK = heads(examples.inputs(heads, rows, heads.device, heads.dtype)).argmax(-1)
        right_NK = (guesses_NK == examples.labels(rows)).long().cumprod(1).sum(1).tolist()
        at = {int(place): row for row, place in enumerate(examples.places_N)}
        root, end = len(prompt), len(found.ids)
        while root + 1 < end:
            gained = min(right_NK[at[root - 1]] + 1, end - root - 1)
            steps, tokens, root = steps + 1, tokens + gained, root + gained
    return tokens / steps


def test_a_decode_gains_what_a_replay_of_the_known_texts_gains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)

    def measured(*_: Any, **__: Any) -> Any:
        return type("Measured", (), {"seconds": {1: 1.0, PLACES + 1: 2.0}})

    monkeypatch.setattr(module.by_nodes, "measure", measured)
    target = target_of(counting_model(12, 1.2))
    recipe = Recipe.model_validate(
        {
            "heads": {"type": "block", "num_heads": PLACES, "draft_vocab": 0, "stored": "float32"},
            "data": {"max_answer_tokens": NEW, "max_seq_length": 90, "rows": 3},
        }
    )
    heads = fresh_heads(recipe, target, torch.arange(VOCAB))
    assert isinstance(heads, BlockHeads)
    corpus = Corpus.from_samples(
        [sample(target, heads.config.wanted_taps, prompt_of(6, 50 + seed)) for seed in range(6)]
    )
    heads.start_at(torch.from_numpy(corpus.hidden_TH))
    sets = Sets(*(examples_of(corpus, part, heads.draft_ids, heads.config) for part in (range(5), [5])))
    settings = TrainSettings(max_steps=80, epochs=100, batch_size=32, learning_rate=0.005)
    outlets = Outlets(lambda _: None, TrainLog(tmp_path))
    train(heads, sets, settings, 0, Checkpoints(tmp_path, RunIdentity("r", "f")), outlets)
    found = Probe(target, PROMPTS, recipe)(heads)
    assert 1.3 < found.tokens_per_step < PLACES + 1
    assert found.tokens_per_step == pytest.approx(replayed(heads.requires_grad_(False), target))
    assert found.speedup == found.tokens_per_step / 2
