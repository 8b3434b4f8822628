"""The law of the prefix pool: a text is the same whether its prompt is read, lent, or lent out of another process.

On every kind of forward, with a pool that is cold, warm, too small, shared and poisoned.
"""

import copy
import functools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from medusa_cli.decode import prefixes as decode_prefixes
from medusa_cli.decode.engine import Engine, Request
from medusa_cli.decode.prefixes import Prefixes
from medusa_cli.decode.rows import Limits
from medusa_cli.drafters.mixed import Budget, GatheredDrafter
from medusa_cli.drafters.suffix import Suffixes
from medusa_cli.prefix import keys as prefix_keys
from medusa_cli.prefix.memory import Memory
from medusa_cli.prefix.pool import PrefixPool
from tests.attending import AttendingDrafter
from tests.fakes import SHAPES, RandomDrafter
from tests.laws import test_length_law as length_law
from tests.laws import test_memory_law as memory_law
from tests.laws.test_memory_law import FORWARDS, TAPS, check_of
from tests.tiny_models import greedy_of, prompt_of, target_of, tiny_model

CHUNK, NEW = 8, 10
SYSTEM = prompt_of(30, 5)
PROMPTS = [[*SYSTEM, *prompt_of(length, seed)] for seed, length in enumerate((1, 9, 20, 3, 17))]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (prefix_keys, decode_prefixes):
        monkeypatch.setattr(module, "CHUNK", CHUNK)


def guesses() -> GatheredDrafter:
    return GatheredDrafter([Suffixes()], Budget(6), "suffix")


def pool_of(most_bytes: int = 2**30) -> PrefixPool:
    return PrefixPool(Memory(most_bytes))


@functools.cache
def wanted(forward: str) -> list[list[int]]:
    model = memory_law.model_of(forward)
    return [greedy_of(model, prompt, NEW) for prompt in PROMPTS]


def written(engine: Engine, prompts: Sequence[Sequence[int]], new: int = NEW, owner: str = "") -> list[list[int]]:
    order = [engine.add(Request(prompt, Limits(new), owner=owner)) for prompt in prompts]
    found: dict[int, list[int]] = {}
    while not engine.idle:
        for gain in engine.step():
            found.setdefault(gain.row.key, []).extend(gain.tokens)
    return [found[key] for key in order]


@pytest.mark.parametrize("forward", FORWARDS)
def test_texts_are_the_same_with_the_pool_cold_warm_and_in_another_engine(forward: str) -> None:
    target, pool = FORWARDS[forward](), pool_of()
    prefixes = Prefixes(target, (), pool)
    engine = Engine(target, guesses(), 3, prefixes=prefixes)
    assert written(engine, PROMPTS) == wanted(forward)
    cold = pool.counts.hits
    assert written(engine, PROMPTS) == wanted(forward)
    assert pool.counts.hits - cold == sum((len(prompt) - 1) // CHUNK * CHUNK for prompt in PROMPTS)
    del engine  # a recorded forward's stores are lent to one cache at a time
    other = Engine(target, guesses(), 2, prefixes=Prefixes(target, (), pool))
    assert written(other, PROMPTS) == wanted(forward)


def test_a_conversation_goes_on_where_the_reply_ended() -> None:
    target, pool, model = FORWARDS["eager"](), pool_of(), tiny_model("llama")
    engine = Engine(target, guesses(), prefixes=Prefixes(target, (), pool))
    text, kept = prompt_of(11), 0
    for turn in range(4):
        reply = greedy_of(model, text, NEW)
        hits = pool.counts.hits
        assert written(engine, [text]) == [reply]
        assert pool.counts.hits - hits == kept // CHUNK * CHUNK
        text = [*text, *reply]
        kept = len(text) - 1  # the last token was decided and never read
        text += prompt_of(3, turn)


def test_what_drafters_remember_is_lent_with_the_keys() -> None:
    target = FORWARDS["eager"]()
    texts = [prompt + text for prompt, text in zip(PROMPTS, wanted("eager"), strict=True)]
    drafter = AttendingDrafter(RandomDrafter(texts, SHAPES["wide"]), TAPS, target.hidden_size)
    pool = pool_of()
    for _ in range(2):
        check = check_of(drafter)
        engine = Engine(target, drafter, 2, [check], prefixes=Prefixes(target, TAPS, pool))
        assert written(engine, PROMPTS) == wanted("eager")
        assert check.num_checks > 10
    assert pool.counts.hits > 100
    keys = [Prefixes(target, taps, pool).keys(SYSTEM, 30, "") for taps in ((), TAPS)]
    assert not set(keys[0]) & set(keys[1])


@pytest.mark.parametrize("name", length_law.MODELS)
def test_tables_that_depend_on_lengths_share_only_what_is_turned_alike(name: str) -> None:
    model, target, pool = length_law.model_of(name), target_of(length_law.model_of(name)), pool_of()
    prompts = [[*SYSTEM[:length], *prompt_of(2, length)] for length in (9, 17, 21, 22, 23, 24, 28, 30, 9, 17, 28)]
    texts = [greedy_of(copy.deepcopy(model), prompt, 12) for prompt in prompts]  # it remembers the longest
    for _ in range(2):
        engine = Engine(target, guesses(), 2, prefixes=Prefixes(target, (), pool))
        assert written(engine, prompts, 12) == texts
    assert pool.counts.hits > 50


def test_a_pool_that_is_too_small_forgets_and_changes_no_text() -> None:
    target = FORWARDS["eager"]()
    column = target.cache_bytes_per_token
    pool = pool_of(5 * CHUNK * column)
    engine = Engine(target, guesses(), 3, prefixes=Prefixes(target, (), pool))
    for _ in range(3):
        assert written(engine, PROMPTS) == wanted("eager")
        assert pool.memory.num_bytes <= 5 * CHUNK * column
    assert 0 < pool.counts.hits < pool.counts.queries


def test_random_traffic_over_one_pool_changes_no_text() -> None:
    rng, target, model = random.Random(2), FORWARDS["eager"](), tiny_model("llama")
    pool = pool_of(40 * CHUNK * target.cache_bytes_per_token)
    engine = Engine(target, guesses(), 4, prefixes=Prefixes(target, (), pool))
    begins = [prompt_of(40, seed) for seed in range(3)]
    asked: dict[int, list[int]] = {}
    found: dict[int, list[int]] = {}
    left = 60
    while left or not engine.idle:
        if left and rng.random() < 0.6:
            prompt = [*rng.choice(begins)[: rng.randint(1, 40)], *prompt_of(rng.randint(1, 6), left)]
            asked[engine.add(Request(prompt, Limits(rng.randint(1, 9)), speculate=rng.random() < 0.7))] = prompt
            left -= 1
        if rng.random() < 0.05 and engine.active:
            engine.cancel(rng.choice(engine.active).key)
        for gain in engine.step():
            found.setdefault(gain.row.key, []).extend(gain.tokens)
    for key, tokens in found.items():
        assert tokens == greedy_of(model, asked[key], 9)[: len(tokens)]
    assert pool.counts.hits > 400


@torch.inference_mode()
def spoilt(pool: PrefixPool, number: float) -> None:
    """Every number of every chunk becomes this one."""
    for chunk in pool.memory._chunks.values():
        for parts in chunk.layers.values():
            for part in parts:
                part.fill_(number)


def test_a_chunk_that_holds_no_numbers_is_read_anew_and_forgotten() -> None:
    target, pool = FORWARDS["eager"](), pool_of()
    prefixes = Prefixes(target, (), pool)
    engine = Engine(target, guesses(), 2, prefixes=prefixes)
    written(engine, PROMPTS)
    spoilt(pool, torch.nan)
    for _ in range(2):
        assert written(engine, PROMPTS) == wanted("eager")
    for prompt in PROMPTS:
        chunks = pool.find(prefixes.keys(prompt, len(prompt), ""))
        assert len(chunks) == len(prompt) // CHUNK
        assert all(part.isfinite().all() for chunk in chunks for parts in chunk.layers.values() for part in parts)


def test_what_one_owner_had_read_is_lent_to_no_other() -> None:
    target, pool = FORWARDS["eager"](), pool_of()
    engine = Engine(target, guesses(), 2, prefixes=Prefixes(target, (), pool))
    assert written(engine, PROMPTS[:1], owner="one") == wanted("eager")[:1]
    hits = pool.counts.hits
    assert written(engine, PROMPTS[:1], owner="two") == wanted("eager")[:1]
    assert pool.counts.hits == hits
    keys = [engine.add(Request(prompt, Limits(NEW), owner=owner)) for prompt, owner in zip(PROMPTS, "ab", strict=False)]
    lent: dict[int, int] = {}
    while not engine.idle:
        lent.update({gain.row.key: gain.row.lent for gain in engine.step()})
    assert [lent[key] for key in keys] == [0, 0], "rows side by side lend each other nothing either"


@pytest.mark.parametrize("part", ["fingerprint", "rows", "files", "runner", "attention"])
def test_keys_and_values_of_another_model_or_another_arithmetic_have_other_keys(part: str) -> None:
    target = FORWARDS["eager"]()
    mine = Prefixes(target, (), pool_of()).keys(SYSTEM, 30, "")
    target.identity = replace(target.identity, **{part: "another"})
    assert not set(mine) & set(Prefixes(target, (), pool_of()).keys(SYSTEM, 30, ""))
