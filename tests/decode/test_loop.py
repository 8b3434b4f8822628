"""The loop: where texts end, what a step costs, what is handed out, and who joins whom. On a tiny llama."""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedTokenizerFast

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.acceptance.lossless import Lossless
from medusa_cli.acceptance.typical import Typical
from medusa_cli.contracts import AcceptanceRule, Context, Draft, Seen, Verdict
from medusa_cli.decode.loop import Generation, Parts, collect, decode
from medusa_cli.decode.rows import Limits
from medusa_cli.decode.text import StopStrings, decode_text
from medusa_cli.drafters.dynamic import DynamicMedusaDrafter
from medusa_cli.drafters.medusa import MedusaDrafter
from medusa_cli.drafters.none import NoDrafter
from medusa_cli.errors import DataError
from medusa_cli.heads.medusa import MedusaConfig, MedusaHeads
from medusa_cli.target.cache import TreeCache
from medusa_cli.target.model import Target
from medusa_cli.trees.dynamic import DynamicShape
from medusa_cli.trees.tree import TokenTree
from tests.fakes import (
    NUM_NEW,
    SHAPES,
    VOCAB,
    KnowingDrafter,
    OracleDrafter,
    RandomDrafter,
    final_hidden,
    greedy_of,
    known,
    prompt_of,
    target_of,
    tiny_model,
)

DEPTH = 5
TEXTS = functools.cache(lambda: known("llama"))
TARGET = functools.cache(lambda: target_of(tiny_model("llama")))


def deep(num_rows: int, rng: torch.Generator) -> TokenTree:
    """A chain beside a few wrong guesses, so that the right nodes are not the first columns."""
    return TokenTree.from_paths([*([0] * depth for depth in range(1, DEPTH + 1)), [1], [2], [1, 0]])


def oracle() -> KnowingDrafter:
    return OracleDrafter(TEXTS().texts, deep)


class Counter:
    """Counts the target's forwards and keeps the cache's lengths after each step."""

    def __init__(self, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prefilled: list[int] = []
        self.num_verified = 0
        self.lengths: list[list[int]] = []
        prefill, verify, keep = target.prefill, target.verify, TreeCache.keep

        def counted_prefill(prompts: Sequence[Sequence[int]], *more: Any, **named: Any) -> Seen:
            self.prefilled.append(len(prompts))
            return prefill(prompts, *more, **named)

        def counted_verify(draft: Draft, cache: TreeCache) -> Seen:
            self.num_verified += 1
            before = list(cache.lengths)
            seen = verify(draft, cache)
            assert cache.lengths == before
            return seen

        def watched_keep(cache: TreeCache, verdict: Verdict) -> None:
            keep(cache, verdict)
            self.lengths.append(list(cache.lengths))

        monkeypatch.setattr(target, "prefill", counted_prefill)
        monkeypatch.setattr(target, "verify", counted_verify)
        monkeypatch.setattr(TreeCache, "keep", watched_keep)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    return Counter(TARGET(), monkeypatch)


def up_to(ids: Sequence[int], stops: frozenset[int]) -> list[int]:
    """The ids up to the first stop, which belongs to them."""
    ends = [place for place, token in enumerate(ids) if token in stops]
    return list(ids[: ends[0] + 1] if ends else ids)


# --- where a text ends ---


@pytest.mark.parametrize("offset", range(2 * DEPTH + 3))
def test_a_stop_id_ends_the_text_at_every_place_of_a_step(offset: int, counter: Counter) -> None:
    # transformers#47912, #48981, #28508: tokens after the end, or one more forward; the root and the bonus token too
    answer = TEXTS().answers[0]
    stops = frozenset({answer[offset]})
    wanted = up_to(answer, stops)
    (found,) = collect(Parts(TARGET(), oracle(), Greedy()), TEXTS().prompts[:1], Limits(NUM_NEW, stops))
    assert found.token_ids == wanted
    assert found.finish_reason == "stop"
    assert found.num_steps == counter.num_verified == math.ceil((len(wanted) - 1) / (DEPTH + 1))
    assert sum(found.kept) == len(wanted) - 1
    if counter.lengths:
        assert counter.lengths[-1] == [len(TEXTS().prompts[0]) + len(wanted) - 1], (
            "the cache holds tokens past the stop"
        )


def test_a_root_that_is_a_stop_id_asks_for_no_forward(counter: Counter) -> None:
    stops = frozenset({TEXTS().answers[0][0]})
    (found,) = collect(Parts(TARGET(), oracle(), Greedy()), TEXTS().prompts[:1], Limits(NUM_NEW, stops))
    assert found == Generation([*stops], "stop", [], [])
    assert (counter.prefilled, counter.num_verified) == ([1], 0)


@pytest.mark.parametrize("drafter", [OracleDrafter, RandomDrafter])
def test_whichever_stop_id_comes_first_ends_each_row(drafter: type[KnowingDrafter]) -> None:
    # vllm#4180, transformers#31362: the second id of a generation config was never looked at
    model = tiny_model("llama")
    target = target_of(model)
    target.model.generation_config.eos_token_id = [TEXTS().answers[0][9], TEXTS().answers[1][7]]
    target = target_of(target.model)
    assert len(target.stop_ids) == 2
    limits = Limits(NUM_NEW, target.stop_ids)
    found = collect(Parts(target, drafter(TEXTS().texts, deep), Greedy()), TEXTS().prompts, limits, max_rows=3)
    assert [each.token_ids for each in found] == [up_to(answer, target.stop_ids) for answer in TEXTS().wanted(3)]


@pytest.mark.parametrize("num_new", range(1, 9))
def test_a_text_never_has_more_tokens_than_asked_for(num_new: int, counter: Counter) -> None:
    # transformers#46993, #47195
    found = collect(Parts(TARGET(), oracle(), Greedy()), TEXTS().prompts, Limits(num_new), max_rows=3)
    assert [each.token_ids for each in found] == TEXTS().wanted(3, num_new)
    assert {each.finish_reason for each in found} == {"length"}
    assert counter.num_verified == math.ceil((num_new - 1) / (DEPTH + 1))


@functools.cache
def letters() -> PreTrainedTokenizerFast:
    """Ids as a letter and a digit: a0, a1, ... j6."""
    inner = Tokenizer(models.WordLevel({f"{chr(97 + index // 10)}{index % 10}": index for index in range(VOCAB)}, "a0"))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.mark.parametrize("drafter", [OracleDrafter, RandomDrafter])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("start", range(2, 2 * DEPTH + 4))
def test_a_stop_string_ends_the_text_wherever_tokens_and_steps_are_cut(
    start: int, size: int, drafter: type[KnowingDrafter]
) -> None:
    # transformers#48039, vllm#47616: text went on, or ids did
    answer = TEXTS().wanted(1)[0]
    text = decode_text(letters(), answer)
    stop = text[start : start + size]
    stops = StopStrings([stop], letters())

    def find_stop(so_far: Sequence[int], new: Sequence[int]) -> int | None:
        hit = stops.find(so_far, new)
        return None if hit is None else hit.num_new

    limits = Limits(NUM_NEW, find_stop=find_stop)
    (found,) = collect(Parts(TARGET(), drafter(TEXTS().texts, deep), Greedy()), TEXTS().prompts[:1], limits)
    # a token has two characters: the text ends with the token in which the stop string's last one is
    end = text.index(stop) + size
    assert found.token_ids == answer[: math.ceil(end / 2)]
    assert found.finish_reason == "stop"


# --- the context's end ---


@functools.cache
def short_target(name: str) -> Target:
    return target_of(short_model(name))


def short_model(name: str) -> Any:
    """A model with 32 positions."""
    return tiny_model(name, **{"n_positions" if name == "gpt2" else "max_position_embeddings": 32})


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama"])
@pytest.mark.parametrize("space", [1, 3, 7])
def test_a_text_ends_at_the_context_s_last_position(name: str, space: int) -> None:
    # vllm#16087, #57941, #58080: a position out of the table, or a crash
    target, prompts = short_target(name), [prompt_of(32 - space), prompt_of(9)]
    assert target.context_limit == 32
    wanted = [greedy_of(short_model(name), prompt, 32 - len(prompt)) for prompt in prompts]
    texts = [prompt + answer for prompt, answer in zip(prompts, wanted, strict=True)]
    for drafter in (OracleDrafter(texts, deep), NoDrafter()):
        limits = Limits(40, context_limit=target.context_limit)
        found = collect(Parts(target, drafter, Greedy()), prompts, limits, max_rows=2)
        assert [each.token_ids for each in found] == wanted
        assert {each.finish_reason for each in found} == {"length"}


@pytest.mark.parametrize("length", [32, 33, 50])
def test_a_prompt_that_fills_the_context_is_refused_before_any_forward(length: int, counter: Counter) -> None:
    # sglang#3574, EAGLE#75
    limits = Limits(5, context_limit=32)
    with pytest.raises(DataError, match=f"the prompt has {length} tokens; the model's context holds 32"):
        collect(Parts(TARGET(), NoDrafter(), Greedy()), [prompt_of(5), prompt_of(length)], limits, max_rows=2)
    assert (counter.prefilled, counter.num_verified) == ([], 0)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(DataError, match="the prompt is empty"):
        collect(Parts(TARGET(), NoDrafter(), Greedy()), [[]], Limits(5))


# --- what is handed out ---


@pytest.mark.parametrize("max_rows", [1, 2, 3])
def test_gains_add_up_to_the_text_and_to_the_states_that_decided_it(max_rows: int) -> None:
    # vllm#26027: of several tokens a step, only the last was streamed
    parts = Parts(TARGET(), RandomDrafter(TEXTS().texts, SHAPES["wide"]), Greedy())
    tokens: dict[int, list[int]] = {}
    hidden: dict[int, list[torch.Tensor]] = {}
    for gain in decode(parts, TEXTS().prompts, Limits(NUM_NEW), max_rows):
        tokens.setdefault(gain.row.key, []).extend(gain.tokens)
        hidden.setdefault(gain.row.key, []).append(gain.hidden_TH)
        assert len(gain.tokens) == len(gain.hidden_TH) > 0
    assert [tokens[key] for key in range(3)] == TEXTS().wanted(3)
    for key, prompt in enumerate(TEXTS().prompts):
        wanted_TH = final_hidden(tiny_model("llama"), [*prompt, *tokens[key][:-1]])[len(prompt) - 1 :]
        torch.testing.assert_close(torch.cat(hidden[key]), wanted_TH, atol=1e-4, rtol=1e-4)


def test_a_finished_row_says_so_in_its_last_gain_and_gains_no_more() -> None:
    last: dict[int, str | None] = {}
    stops = frozenset({TEXTS().answers[1][4]})
    for gain in decode(Parts(TARGET(), oracle(), Greedy()), TEXTS().prompts, Limits(NUM_NEW, stops), max_rows=3):
        assert last.get(gain.row.key) is None
        last[gain.row.key] = gain.row.finish_reason
    assert set(last) == {0, 1, 2}
    assert last[1] == "stop"
    assert None not in last.values()


# --- rows ---


@pytest.mark.parametrize("shape", ["wide", "dynamic"])
def test_rows_side_by_side_write_what_each_writes_alone(shape: str) -> None:
    # EAGLE#250, #90, transformers#32189, unsloth#3795: shape errors, and short rows that are wrong
    def written(prompts: Sequence[Sequence[int]], max_rows: int) -> list[list[int]]:
        parts = Parts(TARGET(), RandomDrafter(TEXTS().texts, SHAPES[shape]), Greedy())
        return [each.token_ids for each in collect(parts, prompts, Limits(NUM_NEW), max_rows)]

    alone = [written([prompt], 1)[0] for prompt in TEXTS().prompts]
    assert written(TEXTS().prompts, 2) == written(TEXTS().prompts, 3) == written(TEXTS().prompts, 8) == alone


def test_a_row_that_ends_with_its_first_token_leaves_the_others_alone() -> None:
    stops = frozenset({TEXTS().answers[1][0]})
    found = collect(Parts(TARGET(), oracle(), Greedy()), TEXTS().prompts, Limits(NUM_NEW, stops), max_rows=3)
    assert [each.token_ids for each in found] == [up_to(answer, stops) for answer in TEXTS().wanted(3)]
    assert found[1].num_steps == 0


class RowWatcher(NoDrafter):
    """Remembers the rows it was started with, as a drafter with a state per row does."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def start(self, context: Context) -> None:
        self.lengths = [len(tokens) for tokens in context.tokens]

    def propose(self, context: Context) -> Draft:
        assert [len(tokens) for tokens in context.tokens] == self.lengths, "rows changed without a start"
        self.lengths = [length + 1 for length in self.lengths]
        return super().propose(context)


def test_a_drafter_is_told_whenever_the_rows_are_no_longer_the_same() -> None:
    stops = frozenset({TEXTS().answers[0][3], TEXTS().answers[2][6]})
    prompts = [*TEXTS().prompts, *TEXTS().prompts]
    found = collect(Parts(TARGET(), RowWatcher(), Greedy()), prompts, Limits(9, stops), max_rows=3)
    assert [each.token_ids for each in found] == [up_to(answer, stops) for answer in TEXTS().wanted(3, 9) * 2]


@pytest.mark.parametrize(("join_at", "prefilled"), [(1, [3, 1, 1, 1]), (2, [3, 2, 1]), (3, [3, 3])])
def test_rows_join_when_enough_are_free(join_at: int, prefilled: list[int], counter: Counter) -> None:
    lengths = {answer[0]: length for answer, length in zip(TEXTS().answers, (3, 7, 9), strict=True)}

    def of_these_lengths(so_far: Sequence[int], new: Sequence[int]) -> int | None:
        return len(new) if len(so_far) + len(new) == lengths[[*so_far, *new][0]] else None

    limits = Limits(NUM_NEW, find_stop=of_these_lengths)
    prompts = [*TEXTS().prompts, *TEXTS().prompts]
    list(decode(Parts(TARGET(), NoDrafter(), Greedy()), prompts, limits, max_rows=3, join_at=join_at))
    assert counter.prefilled == prefilled


def test_rows_that_share_a_beginning_write_what_each_writes_alone() -> None:
    prompts = [[1, 2, 3, 4, 5, last] for last in range(6, 12)]
    parts = Parts(TARGET(), NoDrafter(), Greedy())
    stops = frozenset(range(0, VOCAB, 9))  # texts end at different steps, so that rows join others
    alone = [collect(parts, [prompt], Limits(NUM_NEW, stops))[0] for prompt in prompts]
    assert len({text.num_steps for text in alone}) > 1
    assert collect(parts, prompts, Limits(NUM_NEW, stops), max_rows=2) == alone


def test_prompts_are_asked_for_only_as_rows_become_free() -> None:
    asked = []

    def prompts() -> Iterator[Sequence[int]]:
        for key, prompt in enumerate(TEXTS().prompts):
            asked.append(key)
            yield prompt

    stream = decode(Parts(TARGET(), oracle(), Greedy()), prompts(), Limits(4), max_rows=1)
    assert next(stream).row.key == 0
    assert asked == [0]
    assert {gain.row.key for gain in stream} == {0, 1, 2}


def test_no_prompt_is_no_text() -> None:
    assert collect(Parts(TARGET(), NoDrafter(), Greedy()), [], Limits(4)) == []


# --- heads, seeds, host reads ---


def random_heads(draft_ids: Sequence[int]) -> MedusaHeads:
    target = TARGET()
    config = MedusaConfig(
        num_heads=3,
        num_layers=1,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab=len(draft_ids),
        own_output=False,
        output_bias=False,
        target_name=target.name,
        target_fingerprint=target.fingerprint,
    )
    heads = MedusaHeads.fresh(config, torch.tensor(draft_ids), target.output_weight, None)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn(parameter.shape) / 4)
    return heads.eval().requires_grad_(False)


HEADS_TREE = TokenTree.from_paths([[0], [1], [2], [0, 0], [1, 0], [0, 0, 0]])


@pytest.mark.parametrize("draft_ids", [range(VOCAB), range(0, VOCAB, 3)])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_heads_of_any_quality_leave_the_text_as_it_is(num_rows: int, draft_ids: Sequence[int]) -> None:
    parts = Parts(TARGET(), MedusaDrafter(random_heads(list(draft_ids)), HEADS_TREE), Greedy())
    found = collect(parts, TEXTS().prompts, Limits(NUM_NEW), num_rows)
    assert [each.token_ids for each in found] == TEXTS().wanted(3)


@pytest.mark.parametrize("floor", [0.0, 0.002])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_trees_that_change_with_every_row_and_step_leave_the_text_as_it_is(num_rows: int, floor: float) -> None:
    parts = Parts(TARGET(), DynamicMedusaDrafter(random_heads(list(range(VOCAB))), DynamicShape(9, floor)), Greedy())
    found = collect(parts, TEXTS().prompts, Limits(NUM_NEW), num_rows)
    assert [each.token_ids for each in found] == TEXTS().wanted(3)


def test_the_same_seed_and_tree_write_the_same() -> None:
    # vllm#16077
    def sampled(seed: int) -> list[list[int]]:
        parts = Parts(TARGET(), oracle(), Lossless(temperature=2.0, top_p=0.95, top_k=0), seed=seed)
        return [each.token_ids for each in collect(parts, TEXTS().prompts, Limits(12), max_rows=3)]

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


@pytest.mark.parametrize("rule", [Lossless(1.2, 0.9, 0), Lossless(0.9, 1.0, 20), Typical(0.9)])
def test_sampled_rows_side_by_side_write_what_each_writes_alone(rule: AcceptanceRule) -> None:
    prompts = [prompt_of(length, seed) for seed, length in enumerate((5, 17, 5, 11, 1, 8))]
    limits = Limits(NUM_NEW, frozenset(range(0, VOCAB, 9)))  # texts end at different steps, so that rows join others
    drafter = MedusaDrafter(random_heads(list(range(VOCAB))), TokenTree.from_paths([[0], [1], [0, 0], [0, 1]]))
    alone = []
    for key, prompt in enumerate(prompts):
        nothing_before = [[0]] * key  # a text's stream goes by its place in the run
        alone.append(collect(Parts(TARGET(), drafter, rule, seed=3), [*nothing_before, prompt], limits)[key])
    assert collect(Parts(TARGET(), drafter, rule, seed=3), prompts, limits, max_rows=3) == alone
    assert len({text.num_steps for text in alone}) > 1


class HostReads(TorchDispatchMode):
    """Counts what would make the host wait for a device: reads of values, and results whose size depends on values."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.found: list[str] = []
        for name in ("tolist", "cpu", "numpy"):
            monkeypatch.setattr(torch.Tensor, name, self._counting(name, getattr(torch.Tensor, name)))

    def _counting(self, name: str, method: Any) -> Any:
        def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.found.append(name)
            return method(tensor, *args, **kwargs)

        return counting

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += [name for name in self.WAITS if func.overloadpacket.__name__.startswith(name)]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_step_waits_for_the_device_once(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(TARGET(), MedusaDrafter(random_heads(list(range(VOCAB))), HEADS_TREE), Greedy())
    stream = decode(parts, TEXTS().prompts[:num_rows], Limits(NUM_NEW), max_rows=num_rows)
    # prefill, and one step in which the tree learns its depth
    for _ in range(2 * num_rows):
        next(stream)
    with HostReads(monkeypatch) as reads:
        next(stream)
    assert reads.found == ["tolist"]
