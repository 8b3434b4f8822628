"""A decode while heads learn: real steps of the real loop, held against a replay of texts that are known."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_cli.config.recipe import Recipe, TrainSettings
from medusa_cli.heads.medusa import MedusaHeads
from medusa_cli.model.costs.by_nodes import Measured
from medusa_cli.model.target import Target
from medusa_cli.pipeline import decode_eval as module
from medusa_cli.pipeline.decode_eval import NEW_TOKENS, PROMPTS, Probe, choose_prompts
from medusa_cli.pipeline.run import fresh_heads
from medusa_cli.train.checkpoint import Checkpoints, RunIdentity, TrainLog
from medusa_cli.train.corpus import Corpus, Examples
from medusa_cli.train.events import Outlets
from medusa_cli.train.loop import Sets, train
from medusa_cli.train.store import Sample
from tests.tiny_models import VOCAB, counting_model, final_hidden, greedy_of, prompt_of, target_of, tiny_model

HEADS, NEW = 3, 40
PROMPT_IDS = [prompt_of(length, seed) for seed, length in enumerate((5, 9, 7, 12))]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Sizes whose costs were measured; two nodes more cost one plain step more."""
    seen: list[tuple[int, ...]] = []

    def measured(target: Target, counts: Sequence[int], **_: Any) -> Measured:
        seen.append(tuple(counts))
        torch.rand(3)  # what measuring draws
        return Measured({count: (count + 1) / 2 for count in counts}, 0.0, disturbed=False)

    monkeypatch.setattr(module.by_nodes, "measure", measured)
    return seen


def recipe(kind: str = "medusa", **heads: Any) -> Recipe:
    data = {"max_answer_tokens": NEW, "max_seq_length": 90, "rows": 3}
    return Recipe.model_validate({"heads": {"type": kind, "num_heads": HEADS, "draft_vocab": 0, **heads}, "data": data})


def learnt(target: Target, model: Any, asked: Recipe, folder: Path) -> MedusaHeads:
    """Heads that are right now and then: a few steps on what the model writes after other prompts."""
    samples = []
    for seed in range(6):
        ids = [*prompt_of(6, 50 + seed)]
        ids += greedy_of(model, ids, 40)
        samples.append(Sample(str(seed), ids, final_hidden(model, ids), [False] * 6 + [True] * 40))
    corpus, heads = Corpus.from_samples(samples), fresh_heads(asked, target, torch.arange(VOCAB))
    every = torch.arange(VOCAB)
    sets = Sets(Examples.of(corpus, range(5), every, HEADS), Examples.of(corpus, [5], every, HEADS))
    settings = TrainSettings(max_steps=60, epochs=100, batch_size=64, learning_rate=0.02)
    outlets = Outlets(lambda _: None, TrainLog(folder))
    train(heads, sets, settings, 0, Checkpoints(folder, RunIdentity("r", "f")), outlets)
    return heads


def replayed(heads: MedusaHeads, model: Any, prompts: Sequence[Sequence[int]]) -> float:
    """Tokens a step of a chain, from the texts that the library writes and whole forwards over them."""
    steps = tokens = 0
    for prompt in prompts:
        ids = [*prompt, *greedy_of(model, prompt, NEW)]
        hidden_TH, root = final_hidden(model, ids), len(prompt)
        while root + 1 < len(ids):
            right = 0
            path = torch.tensor(ids[root : root + HEADS] + [0] * HEADS)[:HEADS]
            guesses = heads(heads.inputs(hidden_TH[root - 1], path)).argmax(-1).tolist()
            while right < HEADS and root + 1 + right < len(ids) and guesses[right] == ids[root + 1 + right]:
                right += 1
            gained = min(right + 1, len(ids) - root - 1)
            steps, tokens, root = steps + 1, tokens + gained, root + gained
    return tokens / steps


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_a_decode_gains_what_a_replay_of_the_known_texts_gains(tmp_path: Path, kind: str) -> None:
    model, wanted = counting_model(12, 1.2), recipe(kind, stored="float32")
    target = target_of(model)
    heads = learnt(target, model, wanted, tmp_path)
    found = Probe(target, PROMPT_IDS, wanted)(heads)
    assert 1.1 < found.tokens_per_step < HEADS + 1
    assert found.tokens_per_step == pytest.approx(replayed(heads, model, PROMPT_IDS))
    assert found.speedup == pytest.approx(found.tokens_per_step / 2.5), "a chain of three has four nodes"


def test_heads_that_know_nothing_gain_one_token_a_step() -> None:
    target = target_of(tiny_model("llama"))
    heads = fresh_heads(recipe(), target, torch.arange(VOCAB))
    with torch.no_grad():
        heads.bias += 100.0 * torch.randn(heads.bias.shape, generator=torch.Generator().manual_seed(3))
    assert Probe(target, PROMPT_IDS, recipe())(heads).tokens_per_step < 1.1


def test_the_heads_and_everybody_s_random_numbers_stay_as_they_are(asked: list[tuple[int, ...]]) -> None:
    target = target_of(tiny_model("llama"), runner="packed")
    heads = fresh_heads(recipe(), target, torch.arange(VOCAB)).train()
    before = {name: value.clone() for name, value in heads.state_dict().items()}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    probe = Probe(target, PROMPT_IDS, recipe())
    first, second = probe(heads), probe(heads)
    assert torch.equal(torch.get_rng_state(), state)
    assert first.tokens_per_step == second.tokens_per_step
    assert asked == [(1, HEADS + 1)], "what a step costs is measured once"
    assert heads.training
    assert heads.packed_output is None
    assert all(parameter.requires_grad and parameter.grad is None for parameter in heads.parameters())
    assert all(torch.equal(heads.state_dict()[name], value) for name, value in before.items())


def test_heads_are_decoded_with_as_they_will_be_stored() -> None:
    target, wanted = target_of(tiny_model("llama")), recipe(stored="float16")
    heads = fresh_heads(wanted, target, torch.arange(VOCAB))
    with torch.no_grad():
        heads.weight += 1 / 3
    held = Probe(target, PROMPT_IDS, wanted)._as_stored(heads)
    assert torch.equal(held.weight, heads.weight.detach().half().float())


def test_prompts_are_spread_over_the_samples_and_only_known_ones_are_taken() -> None:
    keys = [str(number) for number in range(40)]
    prompts = {key: [int(key)] for key in keys if int(key) % 2}
    chosen = choose_prompts(keys, prompts)
    assert len(chosen) == PROMPTS
    assert chosen[0] == [1]
    assert chosen[-1][0] > 30
    assert chosen == choose_prompts(keys, prompts)
    assert choose_prompts(keys[:5], prompts) == [[1], [3]]
    assert choose_prompts(keys, {}) == []


def test_a_text_that_ends_at_once_counts_as_plain_decoding() -> None:
    target = target_of(tiny_model("llama"))
    object.__setattr__(target, "stop_ids", frozenset(range(VOCAB)))
    heads = fresh_heads(recipe(), target, torch.arange(VOCAB))
    assert Probe(target, PROMPT_IDS, recipe())(heads).tokens_per_step == 1.0


def test_a_decode_is_bounded_by_what_the_recipe_writes() -> None:
    target = target_of(tiny_model("llama"))
    assert Probe(target, PROMPT_IDS, recipe())._limits.max_new_tokens == NEW < NEW_TOKENS
    assert Probe(target, PROMPT_IDS, recipe())._rows == 3
