"""Law 2 on a model: texts sampled with guesses come with the model's own chances, and are those sampled without.

The tests of the rule itself are in tests/acceptance, on logits made by hand.
"""

import functools

import pytest
import torch
from torch import Tensor

from medusa_cli.acceptance.lossless import Lossless
from medusa_cli.acceptance.random_streams import Stream
from medusa_cli.contracts import Context, Draft, Drafter
from medusa_cli.decode.loop import Generation, Parts, collect
from medusa_cli.decode.rows import Limits
from medusa_cli.drafters.memory import NoMemory
from medusa_cli.drafters.none import NoDrafter
from medusa_cli.trees.tree import TokenTree
from tests.fakes import DRAFTERS, SHAPES, follows
from tests.real_drafters import REAL
from tests.tiny_models import NUM_NEW, SAMPLED, SEED, VOCAB, counting_model, prompt_of, sampled, target_of, tiny_model

PROMPT = prompt_of(6)
RULE = Lossless(temperature=4.0, top_p=1.0, top_k=3)
DRAWS = 3000


def chances(ids: list[int]) -> Tensor:
    """What the rule makes of the library's plain forward: the law of the token after these."""
    return RULE.probabilities(tiny_model("llama")(torch.tensor([ids])).logits[0, -1])


class LikelyDrafter(NoMemory):
    """Puts the two likeliest followers of each root under it, and the likeliest one of the first under that."""

    def __init__(self) -> None:
        self.tree = TokenTree.from_paths([[0], [1], [0, 0]])
        self.following: dict[int, list[int]] = {}
        for root in chances(PROMPT).nonzero().flatten().tolist():
            best = chances([*PROMPT, root]).topk(2).indices.tolist()
            self.following[root] = [*best, int(chances([*PROMPT, root, best[0]]).argmax())]

    def propose(self, context: Context) -> Draft:
        nothing = [0, 0, 0]
        tokens = [
            [ids[-1], *(self.following[ids[-1]] if len(ids) == len(PROMPT) + 1 else nothing)] for ids in context.tokens
        ]
        return Draft(torch.tensor(tokens), self.tree)


@pytest.mark.parametrize("seed", [0, 1])
def test_every_text_of_three_tokens_comes_with_its_own_chance(seed: int) -> None:
    parts = Parts(target_of(tiny_model("llama")), LikelyDrafter(), RULE, seed=seed)
    found = collect(parts, [PROMPT] * DRAWS, Limits(3), max_rows=500)
    assert {each.num_steps for each in found} == {1, 2}, "some guesses are right and some are wrong"
    law = torch.zeros(VOCAB, VOCAB, VOCAB)
    for first in chances(PROMPT).nonzero().flatten().tolist():
        for second in chances([*PROMPT, first]).nonzero().flatten().tolist():
            pair = chances(PROMPT)[first] * chances([*PROMPT, first])[second]
            law[first, second] = pair * chances([*PROMPT, first, second])
    texts_M3 = torch.tensor([each.token_ids for each in found])
    assert follows((texts_M3 * torch.tensor([VOCAB**2, VOCAB, 1])).sum(-1), law.flatten())


# --- token by token ---

RULES = {"plain": (1.0, 1.0, 0), "warm": SAMPLED, "hot": (1.5, 0.95, 20), "sharp": (0.3, 1.0, 5)}
cached_target = functools.cache(lambda name, runner: target_of(tiny_model(name), "eager", runner))


def assert_sampled_alike(name: str, settings: tuple[float, float, int], drafter: str, shape: str, runner: str) -> None:
    """The texts of three rows, side by side and alone, are those sampled without guesses."""
    texts = sampled(name, settings)
    for num_rows in (1, 3):
        guesses = DRAFTERS[drafter](texts.texts, SHAPES[shape])
        parts = Parts(cached_target(name, runner), guesses, Lossless(*settings), seed=SEED)
        found = collect(parts, texts.prompts, Limits(NUM_NEW), max_rows=num_rows)
        assert [each.token_ids for each in found] == texts.wanted(3)


@pytest.mark.parametrize("settings", RULES.values(), ids=RULES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_seed_samples_one_text_whatever_is_guessed(
    drafter: str, shape: str, settings: tuple[float, float, int]
) -> None:
    # vllm#16077: another tree, another text
    assert_sampled_alike("llama", settings, drafter, shape, "eager")


@pytest.mark.parametrize("settings", [SAMPLED, RULES["hot"]], ids=["warm", "hot"])
@pytest.mark.parametrize("drafter", REAL)
def test_a_seed_samples_one_text_whoever_gathers_the_guesses(drafter: str, settings: tuple[float, float, int]) -> None:
    texts, target = sampled("llama", settings), cached_target("llama", "eager")
    parts = Parts(target, REAL[drafter](target, texts.texts), Lossless(*settings), seed=SEED)
    found = collect(parts, texts.prompts, Limits(NUM_NEW), max_rows=2)
    assert [each.token_ids for each in found] == texts.wanted(3)
    assert drafter in ("ngram", "block_chain") or max(max(each.kept) for each in found) > 1


def test_a_text_that_is_copied_from_itself_is_sampled_as_without_copies() -> None:
    target = target_of(counting_model(7, sure=1.0))
    prompts = [[place % 7 for place in range(start, start + 14)] for start in range(3)]

    def written(drafter: Drafter) -> list[Generation]:
        parts = Parts(target, drafter, Lossless(*SAMPLED), seed=SEED)
        return collect(parts, prompts, Limits(NUM_NEW), max_rows=3)

    plain, copied = written(NoDrafter()), written(REAL["ngram"](target, []))
    assert [each.token_ids for each in copied] == [each.token_ids for each in plain]
    counted = [[(prompt[-1] + place) % 7 for place in range(1, NUM_NEW + 1)] for prompt in prompts]
    assert all(each.token_ids != text for each, text in zip(plain, counted, strict=True)), "some copies are wrong"
    assert max(max(each.kept) for each in copied) > 3, "and some are right"


@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "qwen3_moe", "gpt2"])
def test_a_seed_samples_one_text_on_every_kind_of_model(name: str) -> None:
    assert_sampled_alike(name, SAMPLED, "random", "dynamic", "packed")


def test_texts_of_one_run_have_numbers_of_their_own() -> None:
    streams = [Stream(seed, key) for seed in (0, 1) for key in range(3)]
    assert len({tuple(stream.numbers(0, 4)) for stream in streams}) == len(streams)


def test_a_place_keeps_its_number_however_it_is_asked_for() -> None:
    once, piecewise = Stream(1), Stream(1)
    numbers = once.numbers(0, 9)
    assert [piecewise.numbers(place, 3)[0] for place in range(7)] == numbers[:7]
    assert piecewise.numbers(4, 5) == numbers[4:]
