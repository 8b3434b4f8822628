"""The perplexity of given answers is the library's own, over learnt tokens only, and only unlikely ones warn."""

import math
from collections.abc import Sequence

import pytest
import torch

from medusa_cli.contracts import Draft, Seen
from medusa_cli.data.tokens import Tokens
from medusa_cli.model.cache import TreeCache
from medusa_cli.pipeline import perplexity as perplexity_file
from medusa_cli.pipeline.perplexity import perplexity, warning_of
from tests.tiny_models import greedy_of, prompt_of, target_of, tiny_model


def sample(ids: Sequence[int], first_learnt: int) -> Tokens:
    return Tokens(list(ids), [place >= first_learnt for place in range(len(ids))])


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "granite"])
def test_it_is_what_the_library_s_own_loss_says_of_the_learnt_tokens(name: str) -> None:
    model = tiny_model(name)
    samples = [sample(prompt_of(20, seed=1), 6), sample(prompt_of(11, seed=2), 0), sample(prompt_of(5, seed=3), 99)]
    surprises: list[float] = []
    for one in samples[:2]:
        labels = torch.tensor([[i if learnt else -100 for i, learnt in zip(one.ids, one.supervised, strict=True)]])
        with torch.no_grad():
            loss = model(input_ids=torch.tensor([one.ids]), labels=labels).loss
        places = sum(one.supervised[1:])
        surprises += [float(loss)] * places
    wanted = math.exp(sum(surprises) / len(surprises))
    assert perplexity(target_of(model), samples) == pytest.approx(wanted, rel=1e-4)


def test_the_model_s_own_words_are_likelier_than_others() -> None:
    model, target = tiny_model("llama"), target_of(tiny_model("llama"))
    prompts = [prompt_of(9, seed=seed) for seed in range(4)]
    own = [sample([*prompt, *greedy_of(model, prompt, 12)], 9) for prompt in prompts]
    others = [sample([*prompt, *prompt_of(12, seed=50 + prompt[0])], 9) for prompt in prompts]
    mine, theirs = perplexity(target, own), perplexity(target, others)
    assert mine is not None
    assert theirs is not None
    assert mine < theirs / 3


def test_nothing_learnt_has_no_figure_and_brings_no_warning() -> None:
    assert perplexity(target_of(tiny_model("llama")), [sample(prompt_of(5), 99), sample([3], 0)]) is None
    assert warning_of(None, "x") is None


def test_a_sample_of_the_answers_is_looked_at_spread_over_all(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(tiny_model("llama"))
    seen: list[int] = []
    monkeypatch.setattr(perplexity_file, "SAMPLES", 3)
    verify = target.verify

    def watched(draft: Draft, cache: TreeCache, as_long_as: list[int]) -> Seen:
        seen.append(int(draft.tokens_BN[0, 0]))
        return verify(draft, cache, as_long_as)

    monkeypatch.setattr(target, "verify", watched)
    perplexity(target, [sample([place, 1, 2], 1) for place in range(10)])
    assert seen == [0, 3, 6]


def test_the_warning_names_the_figure_the_threshold_and_the_way_out() -> None:
    assert warning_of(perplexity_file.UNLIKELY, "x") is None
    text = warning_of(23.456, "the server's answers") or ""
    assert text.startswith("the model finds the server's answers unlikely: perplexity 23.5, above 8.")
    assert "--answers-from self" in text
