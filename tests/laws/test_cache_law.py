"""Law 4: before every step the cache and the heads' hidden state are those of a fresh reading of the text so far."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.contracts import Context, Draft, Drafter
from medusa_cli.decode.loop import Parts, collect
from medusa_cli.decode.rows import Limits
from medusa_cli.drafters.memory import InnerMemory
from medusa_cli.model.cache import TreeCache
from medusa_cli.model.target import Target
from medusa_cli.trees.tree import TokenTree
from tests.fakes import SHAPES, PerPositionDrafter, RandomDrafter
from tests.real_drafters import REAL
from tests.tiny_models import NUM_NEW, counting_model, greedy_of, known, target_of, tiny_model

LENGTHS = (5, 17, 11, 3, 9, 14, 1)


class CheckingDrafter(InnerMemory):
    """Hands out another drafter's guesses, after comparing all state with the library's forward over each text."""

    def __init__(self, inner: Drafter, model: Any) -> None:
        self.inner = inner
        self.model = model
        self.cache: TreeCache | None = None
        self.num_checks = self.num_moved = 0
        self.lengths: list[int] = []

    def watch(self, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
        """Learn of the cache the loop asks the target for."""
        new_cache = target.new_cache

        def seen(num_rows: int, capacity: int) -> TreeCache:
            self.cache = new_cache(num_rows, capacity)
            return self.cache

        monkeypatch.setattr(target, "new_cache", seen)

    def join(self, first_row: int, prompts: Sequence[Sequence[int]], taps_BTLH: Tensor | None) -> None:
        self.lengths = []
        super().join(first_row, prompts, taps_BTLH)

    def drop(self, row: int) -> None:
        self.lengths = []
        super().drop(row)

    def propose(self, context: Context) -> Draft:
        for row, tokens in enumerate(context.tokens):
            self._check_row(row, tokens, context)
        self.lengths = [len(tokens) for tokens in context.tokens]
        self.num_checks += 1
        return self.inner.propose(context)

    def _check_row(self, row: int, tokens: list[int], context: Context) -> None:
        assert self.cache is not None
        committed = list(tokens[:-1])
        assert self.cache.lengths[row] == len(committed)
        assert int(context.root_B[row]) == tokens[-1]
        fresh_layers, hidden_TH = read(self.model, committed)
        close(context.hidden_BH[row], hidden_TH[-1])
        for mine, fresh in zip(self.cache.layers, fresh_layers, strict=True):
            # The library's own cache forgets what lies before a sliding window.
            columns = slice(len(committed) - fresh.keys.shape[2], len(committed))
            close(mine.keys[row, :, columns], fresh.keys[0])
            close(mine.values[row, :, columns], fresh.values[0])
        if self.lengths and context.accepted_hidden_BDH is not None:
            kept = len(tokens) - self.lengths[row]
            self.num_moved += kept > 1
            close(context.accepted_hidden_BDH[row, :kept], hidden_TH[-kept:])


def read(model: Any, ids: list[int]) -> tuple[list[Any], Tensor]:
    """The layers of the library's cache and the final hidden states [T, H] after one plain forward over one text."""
    seen = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0][0]))
    out = model(torch.tensor([ids]), use_cache=True)
    hook.remove()
    return (out.cache if "cache" in out else out.past_key_values).layers, seen[0]


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("num_rows", "shape"), [(1, "wide"), (3, "wide"), (3, "dynamic")])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2"])
def test_every_step_leaves_what_a_fresh_prefill_would(
    name: str, num_rows: int, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # mlx-examples#149, transformers#30042; rows retire and join in between
    texts = known(name, LENGTHS)
    target = target_of(tiny_model(name), "eager")
    drafter = CheckingDrafter(RandomDrafter(texts.texts, SHAPES[shape]), tiny_model(name))
    drafter.watch(target, monkeypatch)
    prompts = texts.prompts if num_rows > 1 else texts.prompts[:4]
    found = collect(Parts(target, drafter, Greedy()), prompts, Limits(NUM_NEW), max_rows=num_rows)
    assert [each.token_ids for each in found] == texts.wanted(len(prompts))
    assert drafter.num_checks >= 20
    assert drafter.num_moved >= 10, "paths of several nodes are what can go wrong"


@pytest.mark.parametrize("drafter", ["perfect", "mixed"])
def test_gathered_guesses_leave_what_a_fresh_prefill_would(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = known("llama", LENGTHS)
    target = target_of(tiny_model("llama"), "eager")
    checking = CheckingDrafter(REAL[drafter](target, texts.texts), tiny_model("llama"))
    checking.watch(target, monkeypatch)
    found = collect(Parts(target, checking, Greedy()), texts.prompts[:4], Limits(NUM_NEW), max_rows=2)
    assert [each.token_ids for each in found] == texts.wanted(4)
    assert checking.num_moved >= 10


def uneven(num_rows: int, rng: torch.Generator) -> TokenTree:
    """The likeliest path has one node, beside it hangs a chain of four."""
    return TokenTree.from_paths([[0], [1], [1, 0], [1, 0, 0], [1, 0, 0, 0]])


@pytest.mark.parametrize("period", [3, 6])
def test_token_0_after_a_path_shorter_than_the_deepest_is_no_padding_of_it(
    period: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Medusa#64: padding of the short path held token 0, so it was accepted where the target said 0
    model = counting_model(period)
    prompts = [[1] * 4, [2, 0, 1]]
    texts = [prompt + greedy_of(model, prompt, 13) for prompt in prompts]
    target = target_of(model)
    drafter = CheckingDrafter(PerPositionDrafter(texts, uneven, right=[1]), model)
    drafter.watch(target, monkeypatch)
    found = collect(Parts(target, drafter, Greedy()), prompts, Limits(13), max_rows=2)
    for prompt, text, each in zip(prompts, texts, found, strict=True):
        assert each.token_ids == text[len(prompt) :] == [(prompt[-1] + place) % period for place in range(1, 14)]
        assert each.kept == [2] * 6
        assert 0 in each.token_ids[2::2], "the token after a kept path"
