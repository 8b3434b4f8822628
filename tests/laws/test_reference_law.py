"""The engine and the reference decoder write the same texts, in the same steps, over random models.

The reference knows no cache, no mask, no tree of tensors and no batch: it asks the library's plain forward about every
prefix by itself. MEDUSA_RANDOM_MODELS says how many models are tried.
"""

import functools
import os
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

import pytest
import torch

from medusa_cli import reference
from medusa_cli.acceptance.lossless import Lossless
from medusa_cli.acceptance.random_streams import Stream, _exponential
from medusa_cli.acceptance.sampling import GREEDY, Choosing
from medusa_cli.contracts import Context, Draft
from medusa_cli.decode.engine import Engine, Request
from medusa_cli.decode.rows import Limits
from medusa_cli.drafters.memory import NoMemory
from medusa_cli.drafters.trie import Picked, Trie, draft_of
from medusa_cli.model.target import Target
from tests.fakes import follows
from tests.tiny_models import VOCAB, prompt_of, target_of, tiny_model

NUM_MODELS = int(os.environ.get("MEDUSA_RANDOM_MODELS", "120"))
IN_TURN = 40  # models of one test
NUM_NEW, ROWS = 12, 2
Guess = Callable[[Sequence[int]], list[list[int]]]


@functools.cache
def shared_target() -> Target:
    """A llama of one small layer, whose numbers are drawn anew for each model."""
    return target_of(
        tiny_model(
            "llama", num_hidden_layers=1, hidden_size=16, intermediate_size=24, head_dim=8, num_attention_heads=2
        )
    )


def random_target(seed: int) -> Target:
    target, rng = shared_target(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in target.model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=rng) * 1.5 / parameter.shape[-1] ** 0.5)
    return target


def probabilities(target: Target) -> Callable[[Sequence[int]], Mapping[int, float]]:
    """The library's plain forward over a prefix, as the reference wants it."""

    @functools.cache
    def asked(prefix: tuple[int, ...]) -> Mapping[int, float]:
        with torch.inference_mode():
            logits_V = target.model(torch.tensor([prefix]), use_cache=False).logits[0, -1]
        return dict(enumerate(logits_V.double().softmax(-1).tolist()))

    return lambda text: asked(tuple(text))


def guesses_about(prompt: Sequence[int], answer: Sequence[int], seed: int) -> Guess:
    """Paths after any beginning of this text: some right, some wrong, some short, some none.

    None after the prompt alone: the engine takes the first token from the prefill, before anybody guesses.
    """
    text = [*prompt, *answer]

    def guess(so_far: Sequence[int]) -> list[list[int]]:
        if len(so_far) == len(prompt):
            return []
        rng = random.Random(f"{seed} {len(so_far)}")
        ahead = list(text[len(so_far) :])[: rng.randint(0, 4)]
        paths = [[token if rng.random() < 0.8 else rng.randrange(VOCAB) for token in ahead] for _ in range(2)]
        return [*paths, [rng.randrange(VOCAB)]] if rng.random() < 0.9 else []

    return guess


class Guesses(NoMemory):
    """The same paths, as the engine wants them: each row's own, by the text that it begins with."""

    size = 9

    def __init__(self, of_prompt: Mapping[tuple[int, ...], Guess]) -> None:
        self.of_prompt = of_prompt

    def propose(self, context: Context) -> Draft:
        picked = []
        for tokens in context.tokens:
            trie = Trie(tokens[-1])
            (guess,) = (guess for prompt, guess in self.of_prompt.items() if tuple(tokens[: len(prompt)]) == prompt)
            for path in guess(tokens):
                trie.add_path(path, [1.0] * len(path))
            picked.append(Picked(trie, range(1, len(trie.tokens))))
        return draft_of(picked, context.root_B.device)


def by_reference(model: Any, prompt: Sequence[int], drafter: Any, rule: Any, stops: frozenset[int]) -> Any:
    text = reference.Text(prompt, NUM_NEW, stops)
    with closing(reference.Verifier(model, workers=1)) as verifier:
        steps = list(reference.decode(text, verifier, drafter, rule))
    return text, [step.tokens for step in steps]


def by_engine(
    target: Target, drafter: Guesses, requests: Sequence[Request]
) -> list[tuple[list[list[int]], str | None]]:
    """What each step brought each text, and why it ended."""
    engine = Engine(target, drafter, max_rows=len(requests))
    keys = [engine.add(request) for request in requests]
    steps: dict[int, list[list[int]]] = {key: [] for key in keys}
    reasons: dict[int, str | None] = {}
    while not engine.idle:
        for gain in engine.step():
            steps[gain.row.key].append(gain.tokens)
            reasons[gain.row.key] = gain.row.finish_reason
    return [(steps[key], reasons[key]) for key in keys]


@pytest.mark.parametrize("way", ["greedy", "sampled"])
@pytest.mark.parametrize("first", range(0, NUM_MODELS, IN_TURN))
def test_both_write_the_same_texts_in_the_same_steps(first: int, way: str) -> None:
    for seed in range(first, min(NUM_MODELS, first + IN_TURN)):
        target = random_target(seed)
        model, prompts = probabilities(target), [prompt_of(3 + row, seed) for row in range(ROWS)]
        stops = frozenset(random.Random(seed).sample(range(VOCAB), 4))
        streams = [Stream(seed, row) for row in range(ROWS)]
        choosing = GREEDY if way == "greedy" else Choosing(Lossless(1.0, 1.0, 0))
        wanted, of_prompt = [], {}
        for prompt, stream in zip(prompts, streams, strict=True):
            rule = rule_of(way, stream, len(prompt))
            plain, _ = by_reference(model, prompt, None, rule, stops)
            of_prompt[tuple(prompt)] = guess = guesses_about(prompt, plain.tokens, seed)
            text, steps = by_reference(model, prompt, guess, rule, stops)
            assert text.tokens == plain.tokens
            wanted.append((steps, text.finish_reason))
        requests = [
            Request(prompt, Limits(NUM_NEW, stops), choosing, stream)
            for prompt, stream in zip(prompts, streams, strict=True)
        ]
        assert by_engine(target, Guesses(of_prompt), requests) == wanted, f"model {seed}"


def rule_of(way: str, stream: Stream, prompt_tokens: int) -> Any:
    """The same random numbers that the engine takes for the places of this text."""
    if way == "greedy":
        return reference.Greedy()

    def number(place: int, token: Any) -> float:
        uniform_1 = torch.tensor(stream.numbers(place - prompt_tokens, 1), dtype=torch.float64)
        return float(_exponential(uniform_1, torch.tensor([[token]])))

    return reference.Sampling(number=number)


@pytest.mark.parametrize("who", ["reference", "engine"])
def test_each_samples_by_the_models_own_chances(who: str) -> None:
    """By numbers of its own: the second token, after guesses of the likeliest ones, against the law."""
    target, prompt, draws = random_target(7), prompt_of(4), 1500
    model = probabilities(target)
    law_V = torch.zeros(VOCAB, dtype=torch.float64)
    for first, chance in model(prompt).items():
        law_V += chance * torch.tensor(list(model([*prompt, first]).values()), dtype=torch.float64)

    def guess(so_far: Sequence[int]) -> list[list[int]]:
        found = model(so_far)
        return [[token] for token in sorted(found, key=lambda token: -found[token])[:2]]

    if who == "reference":
        texts = [
            by_reference(model, prompt, guess, reference.Sampling(seed), frozenset())[0].tokens for seed in range(draws)
        ]
    else:
        choosing = Choosing(Lossless(1.0, 1.0, 0))
        requests = [Request(prompt, Limits(2), choosing, Stream(99, key)) for key in range(draws)]
        found = by_engine(target, Guesses({tuple(prompt): guess}), requests)
        texts = [[token for step in steps for token in step] for steps, _ in found]
    assert follows(torch.tensor([text[1] for text in texts]), law_V)
