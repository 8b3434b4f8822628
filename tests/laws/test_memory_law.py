"""The laws for drafters with a memory: the text is the greedy one, and what they remember is that of a fresh reading.

On every kind of forward, with rows that come and go, prompts that are read in pieces and beginnings that are lent.
"""

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from medusa_cli.contracts import Context, Draft, Drafter, Seen
from medusa_cli.decode.engine import Engine, Request
from medusa_cli.decode.rows import Limits
from medusa_cli.drafters.adaptive import WatchedDrafter
from medusa_cli.drafters.mixed import Budget, GatheredDrafter
from medusa_cli.drafters.suffix import Suffixes
from medusa_cli.drafters.trie import Trie
from medusa_cli.errors import TargetError
from medusa_cli.model import prefill
from medusa_cli.model.cache import TreeCache
from medusa_cli.model.runners.cuda_graphs import GraphedForward
from medusa_cli.model.target import Target
from tests.attending import AttendingDrafter, MemoryCheck, by_the_library, by_the_target
from tests.block_heads import BlockCheck, HelpedDrafter, block_heads
from tests.decode.test_engine import run
from tests.fakes import SHAPES, RandomDrafter
from tests.laws import test_length_law as length_law
from tests.recorder import on_cpu
from tests.tiny_models import NUM_NEW, SPARE, greedy_of, prompt_of, quantised_model, target_of, tiny_model

TAPS = (2, 0, 1)  # what the output sees, the embeddings and one in between, in no order
LENGTHS = (5, 17, 11, 3, 9, 14, 1)


def graphed() -> Target:
    target = target_of(tiny_model("llama"), "sdpa")
    target.use(GraphedForward(target.at, on_cpu, torch.device("cpu")))
    return target


FORWARDS: dict[str, Callable[[], Target]] = {
    "eager": lambda: target_of(tiny_model("llama"), "eager"),
    "packed": lambda: target_of(tiny_model("llama"), "grouped", "packed"),
    "blocks": lambda: target_of(quantised_model(), "grouped", "blocks"),
    "compiled": lambda: target_of(tiny_model("llama"), "grouped", "compiled"),
    "recorded": graphed,
}


def model_of(forward: str) -> Any:
    return quantised_model() if forward == "blocks" else tiny_model("llama")


@functools.cache
def texts_of(forward: str) -> list[list[int]]:
    """Prompts and what the library writes after each."""
    prompts = [prompt_of(length) for length in LENGTHS]
    return [prompt + greedy_of(model_of(forward), prompt, NUM_NEW + SPARE) for prompt in prompts]


def drafter_of(target: Target, texts: Sequence[Sequence[int]], shape: str = "wide") -> AttendingDrafter:
    return AttendingDrafter(RandomDrafter(texts, SHAPES[shape]), TAPS, target.hidden_size)


def check_of(drafter: AttendingDrafter, forward: str = "eager") -> MemoryCheck:
    return MemoryCheck(drafter, by_the_library(model_of(forward), drafter.taps))


def written_by(engine: Engine, texts: Sequence[Sequence[int]]) -> None:
    """Asks for these texts and compares what is written."""
    keys = [engine.add(Request(text[:length], Limits(NUM_NEW))) for text, length in zip(texts, LENGTHS, strict=False)]
    written = run(engine)
    for key, text, length in zip(keys, texts, LENGTHS, strict=False):
        assert written[key] == text[length : length + NUM_NEW]


@pytest.mark.parametrize(("shape", "num_rows"), [("wide", 1), ("dynamic", 3)])
@pytest.mark.parametrize("forward", FORWARDS)
def test_a_drafter_with_a_memory_writes_the_greedy_text_and_remembers_it(
    forward: str, shape: str, num_rows: int
) -> None:
    target, texts = FORWARDS[forward](), texts_of(forward)
    drafter = drafter_of(target, texts, shape)
    check = check_of(drafter, forward)
    written_by(Engine(target, drafter, num_rows, [check]), texts)
    assert check.num_checks > 40
    assert check.num_moved > 20, "paths of several nodes are what can go wrong"
    assert drafter.moves > 0 or num_rows == 1, "holes are filled by the last row"
    if forward == "recorded":
        (recorded,) = target.forwards
        assert isinstance(recorded, GraphedForward)
        assert any(bucket.taps == TAPS for bucket in recorded._recorded)


@pytest.mark.parametrize("name", length_law.MODELS)
def test_rows_that_are_read_anew_and_tables_that_change_are_remembered_as_they_are(name: str) -> None:
    target, texts = target_of(length_law.model_of(name)), length_law.texts_of(name)
    drafter = drafter_of(target, texts)
    check = MemoryCheck(drafter, by_the_target(target, TAPS))
    engine = Engine(target, drafter, 3, [check])
    prompts = [text[:length] for text, length in zip(texts, length_law.LENGTHS, strict=True)]
    keys = [engine.add(Request(prompt, Limits(length_law.NEW))) for prompt in prompts]
    written = run(engine)
    assert [[*prompt, *written[key]] for prompt, key in zip(prompts, keys, strict=True)] == texts
    assert check.num_checks > 40


def attending(target: Target, texts: Sequence[Sequence[int]]) -> tuple[Drafter, Any]:
    drafter = drafter_of(target, texts, "dynamic")
    return drafter, check_of(drafter)


def block(target: Target, texts: Sequence[Sequence[int]]) -> tuple[Drafter, Any]:
    drafter = HelpedDrafter(block_heads(target), 5, texts)
    return GatheredDrafter([drafter], Budget(8)), BlockCheck(drafter, by_the_library(model_of("eager"), drafter.taps))


@pytest.mark.parametrize("kind", [attending, block])
def test_rows_that_come_go_and_are_cancelled_leave_the_others_their_memory(
    kind: Callable[..., tuple[Drafter, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", 6)  # prompts are read in pieces between steps
    rng, target = random.Random(4), FORWARDS["eager"]()
    template = prompt_of(12)  # which is lent
    prompts = [[*template, *prompt_of(1 + seed % 7, seed)] for seed in range(40)]
    texts = [prompt + greedy_of(tiny_model("llama"), prompt, 18) for prompt in prompts]
    drafter, check = kind(target, texts)
    engine = Engine(target, drafter, 4, [check])
    lent: list[int] = []
    copy_prefix = TreeCache.copy_prefix

    def watched(cache: TreeCache, source: int, rows: slice, length: int) -> None:
        lent.append(length)
        copy_prefix(cache, source, rows, length)

    monkeypatch.setattr(TreeCache, "copy_prefix", watched)
    cancelled: set[int] = set()
    written: dict[int, list[int]] = {}
    waiting = list(enumerate(prompts))
    while waiting or not engine.idle:
        if waiting and rng.random() < 0.5:
            number, prompt = waiting.pop(0)
            assert engine.add(Request(prompt, Limits(rng.randint(1, 10)), speculate=rng.random() < 0.8)) == number
        if rng.random() < 0.05 and (engine.active or engine._reading):
            key = rng.choice([*engine.active, *engine._reading]).key
            engine.cancel(key)
            cancelled.add(key)
        for gain in engine.step():
            written.setdefault(gain.row.key, []).extend(gain.tokens)
    for key, tokens in written.items():
        assert tokens == texts[key][len(prompts[key]) :][: len(tokens)]
    assert len(cancelled) > 3
    assert check.num_checks > 80
    assert 12 in lent


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("forward", FORWARDS)
def test_the_block_drafter_writes_the_greedy_text_and_remembers_it(forward: str, num_rows: int) -> None:
    target, texts = FORWARDS[forward](), texts_of(forward)
    heads = block_heads(target)
    if forward == "packed":
        heads.pack(blocks=False)
    drafter = HelpedDrafter(heads, 6, texts)
    check = BlockCheck(drafter, by_the_library(model_of(forward), drafter.taps))
    written_by(Engine(target, GatheredDrafter([drafter, Suffixes()], Budget(9)), num_rows, [check]), texts)
    assert check.num_checks > 30
    assert check.num_moved > 20, "paths of several nodes are what can go wrong"
    assert drafter.moves > 0 or num_rows == 1, "holes are filled by the last row"
    assert drafter.num_guessed > 40


@pytest.mark.parametrize("name", length_law.MODELS)
def test_the_block_drafter_remembers_rows_that_are_read_anew(name: str) -> None:
    target, texts = target_of(length_law.model_of(name)), length_law.texts_of(name)
    drafter = HelpedDrafter(block_heads(target), 6, texts)
    check = BlockCheck(drafter, by_the_target(target, drafter.taps))
    engine = Engine(target, GatheredDrafter([drafter], Budget(9)), 3, [check])
    prompts = [text[:length] for text, length in zip(texts, length_law.LENGTHS, strict=True)]
    keys = [engine.add(Request(prompt, Limits(length_law.NEW))) for prompt in prompts]
    written = run(engine)
    assert [[*prompt, *written[key]] for prompt, key in zip(prompts, keys, strict=True)] == texts
    assert check.num_checks > 40


class RememberingSource(AttendingDrafter):
    """The same memory as one source of guesses among others; it adds none."""

    def add_guesses(self, context: Context, tries: Sequence[Trie], floor: float) -> None:
        assert self.cache.lengths[: len(tries)] == [len(tokens) - 1 for tokens in context.tokens]


def test_wrappers_pass_on_what_is_to_be_remembered() -> None:
    target, texts = FORWARDS["eager"](), texts_of("eager")
    known = RandomDrafter(texts, SHAPES["wide"])
    one, two = (RememberingSource(known, taps, target.hidden_size) for taps in ((1,), (2, 1)))
    drafter = WatchedDrafter(GatheredDrafter([Suffixes(), one, two], Budget(4)))
    assert drafter.taps == (1, 2)
    library = tiny_model("llama")
    checks = [
        MemoryCheck(one, by_the_library(library, one.taps), [0]),
        MemoryCheck(two, by_the_library(library, two.taps), [1, 0]),
    ]
    written_by(Engine(target, drafter, 3, checks), texts)
    assert all(check.num_checks > 40 for check in checks)


def test_a_broken_step_that_is_taken_again_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    target, texts = FORWARDS["eager"](), texts_of("eager")[:2]
    drafter = drafter_of(target, texts)
    verify, spoilt = target.verify, iter(range(3))

    def broken(draft: Draft, cache: TreeCache, **named: Any) -> Seen:
        seen = verify(draft, cache, **named)
        if draft.tree.num_nodes > 1 and next(spoilt, None) is not None:
            seen.logits_BNV.fill_(torch.nan)
        return seen

    monkeypatch.setattr(target, "verify", broken)
    check = check_of(drafter)
    written_by(Engine(target, drafter, 2, [check]), texts)
    assert next(spoilt, None) is None
    assert check.num_checks > 12


def test_a_second_engine_finds_the_memory_of_the_first_gone() -> None:
    target, texts = FORWARDS["eager"](), texts_of("eager")
    drafter = drafter_of(target, texts)
    for _ in range(2):
        check = check_of(drafter)
        engine = Engine(target, drafter, 2, [check])
        for text, length in zip(texts[:2], LENGTHS, strict=False):
            engine.add(Request(text[:length], Limits(NUM_NEW)))
        for _ in range(4):
            engine.step()  # and is given up in the middle
        assert check.num_checks > 4


@pytest.mark.parametrize("taps", [(3,), (-1,)])
def test_layers_that_the_model_has_not_are_refused_in_words(taps: tuple[int, ...]) -> None:
    target = FORWARDS["eager"]()
    with pytest.raises(TargetError, match="the model has the numbers 0 to 2"):
        Engine(target, AttendingDrafter(RandomDrafter([], SHAPES["wide"]), taps, target.hidden_size))
