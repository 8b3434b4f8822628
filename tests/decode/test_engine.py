"""The engine: texts that join, leave, are cancelled or sampled in ways of their own change no other. A tiny llama."""

import copy
import functools
import random
import sys
from collections.abc import Sequence

import pytest
import torch

from medusa_cli.acceptance.logits_processors import shaping_of
from medusa_cli.acceptance.lossless import Lossless
from medusa_cli.acceptance.random_streams import Stream
from medusa_cli.acceptance.sampling import GREEDY, Choosing
from medusa_cli.acceptance.typical import Typical
from medusa_cli.contracts import Context, Draft
from medusa_cli.decode.engine import Engine, Request
from medusa_cli.decode.memory import columns_for
from medusa_cli.decode.rows import Limits
from medusa_cli.drafters.none import NoDrafter
from medusa_cli.errors import DataError
from medusa_cli.model import prefill
from tests.decode.tiny_llama import TARGET, TEXTS, oracle
from tests.fakes import SHAPES, OracleDrafter, RandomDrafter
from tests.tiny_models import NUM_NEW, VOCAB, prompt_of, target_of, tiny_model

PENALTY = shaping_of({"repetition_penalty": 1.7}, frozenset({0}), torch.device("cpu"))
WAYS = (
    GREEDY,
    Choosing(Lossless(1.2, 0.9, 0)),
    Choosing(Lossless(0.8, 1.0, 12)),
    Choosing(Typical(0.9)),
    Choosing(GREEDY.rule, PENALTY),
    Choosing(Lossless(1.0, 1.0, 0), PENALTY),
)


def run(engine: Engine) -> dict[int, list[int]]:
    """Every text, by key."""
    written: dict[int, list[int]] = {}
    while not engine.idle:
        for gain in engine.step():
            written.setdefault(gain.row.key, []).extend(gain.tokens)
    return written


def request(number: int) -> Request:
    """One of many different wishes; the same number is the same wish."""
    rng = random.Random(number)
    stops = frozenset(range(0, VOCAB, 9)) if rng.random() < 0.5 else frozenset()
    return Request(
        prompt_of(rng.choice([1, 3, 5, 11, 17]), rng.randrange(6)),
        Limits(rng.randint(1, 10), stops, rng.choice([None, 24, 96])),
        rng.choice(WAYS),
        Stream(rng.randrange(3), number),
        rng.random() < 0.7,
    )


def tree_of_each() -> RandomDrafter:
    return RandomDrafter(TEXTS().texts, SHAPES["dynamic"])


@functools.cache
def alone(number: int) -> list[int]:
    """What this wish is answered with when nobody else is there and nothing is guessed."""
    engine = Engine(TARGET(), NoDrafter())
    key = engine.add(request(number))
    return run(engine)[key]


def test_rows_that_are_sampled_in_ways_of_their_own_write_what_each_writes_alone() -> None:
    numbers = [n for n in range(60) if not isinstance(request(n).choosing.rule, Typical)]
    engine = Engine(TARGET(), tree_of_each(), max_rows=5)
    keys = {engine.add(request(number)): number for number in numbers}
    assert run(engine) == {key: alone(number) for key, number in keys.items()}
    assert len({id(request(number).choosing) for number in numbers}) == len(WAYS) - 1


def test_typical_acceptance_beside_other_rows_writes_what_it_writes_alone_with_the_same_guesses() -> None:
    texts = TEXTS()
    wish = Request(texts.prompts[0], Limits(NUM_NEW), Choosing(Typical(0.9)), Stream(1, 1))
    single = Engine(TARGET(), OracleDrafter(texts.texts, SHAPES["wide"]))
    single.add(wish)
    mixed = Engine(TARGET(), OracleDrafter(texts.texts, SHAPES["wide"]), max_rows=3)
    for each in (Request(texts.prompts[1], Limits(NUM_NEW)), wish, Request(texts.prompts[2], Limits(NUM_NEW), WAYS[1])):
        mixed.add(each)
    assert run(mixed)[1] == run(single)[0]


def test_a_row_without_guesses_leaves_the_others_theirs() -> None:
    texts = TEXTS()
    engine = Engine(TARGET(), oracle(), max_rows=3)
    for index, prompt in enumerate(texts.prompts):
        engine.add(Request(prompt, Limits(NUM_NEW), speculate=index != 1))
    rows = {}
    while not engine.idle:
        rows |= {gain.row.key: gain.row for gain in engine.step()}
    assert [rows[key].new_tokens for key in range(3)] == texts.wanted(3)
    assert set(rows[1].kept) == {1}, "one token a step"
    assert max(rows[0].kept) > 1
    assert len(rows[0].kept) < len(rows[1].kept)


class Asked(NoDrafter):
    """Counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def propose(self, context: Context) -> Draft:
        self.times += 1
        return super().propose(context)


def test_nobody_guesses_where_no_row_wants_guesses() -> None:
    drafter = Asked()
    engine = Engine(TARGET(), drafter)
    engine.add(Request(TEXTS().prompts[0], Limits(4), speculate=False))
    run(engine)
    assert drafter.times == 0


def test_a_cancelled_text_gains_nothing_more_and_its_row_is_free_at_once() -> None:
    texts = TEXTS()
    engine = Engine(TARGET(), oracle(), max_rows=2)
    first, second, third = (engine.add(Request(prompt, Limits(NUM_NEW))) for prompt in texts.prompts)
    engine.step()
    engine.step()
    engine.cancel(first)
    assert [row.key for row in engine.active] == [second]
    written = run(engine)
    assert first not in written
    assert written[third] == texts.wanted(3)[2]


def test_a_text_that_waits_can_be_cancelled_and_a_strange_key_changes_nothing() -> None:
    engine = Engine(TARGET(), NoDrafter())
    first = engine.add(Request(TEXTS().prompts[0], Limits(3)))
    second = engine.add(Request(TEXTS().prompts[1], Limits(3)))
    engine.step()
    engine.cancel(second)
    engine.cancel(77)
    assert set(run(engine)) == {first}


def test_a_text_whose_logits_are_not_finite_ends_alone() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    model.model.embed_tokens.weight[VOCAB - 1] = float("nan")
    spoilt, sound = [5, VOCAB - 1, 7], TEXTS().prompts
    engine = Engine(target_of(model), OracleDrafter(TEXTS().texts, SHAPES["chain"]), max_rows=3)
    first = engine.add(Request(sound[0], Limits(NUM_NEW)))
    bad = engine.add(Request(spoilt, Limits(NUM_NEW)))
    last = engine.add(Request(sound[1], Limits(NUM_NEW)))
    rows, written = {}, {}
    while not engine.idle:
        for gain in engine.step():
            rows[gain.row.key] = gain.row
            written.setdefault(gain.row.key, []).extend(gain.tokens)
    assert (rows[bad].finish_reason, written[bad]) == ("error", [])
    assert "not finite" in str(rows[bad].error)
    assert [written[first], written[last]] == TEXTS().wanted(3)[:2]
    assert rows[first].error is None


@pytest.mark.parametrize(("prompt", "limits"), [([], Limits(3)), ([1] * 20, Limits(3, context_limit=20))])
def test_a_request_that_can_never_be_written_is_refused_at_once(prompt: Sequence[int], limits: Limits) -> None:
    engine = Engine(TARGET(), NoDrafter())
    with pytest.raises(DataError):
        engine.add(Request(prompt, limits))
    assert engine.idle


def test_stats_count_what_was_guessed_and_kept() -> None:
    engine = Engine(TARGET(), oracle(), max_rows=2)
    assert (engine.stats().held, engine.stats().free) == (0, None)
    for prompt in TEXTS().prompts:
        engine.add(Request(prompt, Limits(NUM_NEW)))
    engine.step()
    during = engine.stats()
    assert (during.rows, during.waiting) == (2, 1)
    assert 0 < during.columns <= during.held
    run(engine)
    after = engine.stats()
    assert (after.rows, after.waiting, after.columns, after.held) == (0, 0, 0, 0)
    # the first token of each text is the prefill's, and each step brings one that was not guessed
    steps_of_rows = 3 * (NUM_NEW - 1) - after.kept
    assert after.kept > steps_of_rows > 0
    assert after.drafted >= after.kept


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tokens of a prompt at once."""
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", 4)


@pytest.mark.usefixtures("short_pieces")
def test_others_go_on_while_a_long_prompt_is_read() -> None:
    engine = Engine(TARGET(), NoDrafter(), max_rows=2)
    first = engine.add(Request(TEXTS().prompts[0][:3], Limits(NUM_NEW)))
    engine.step()
    engine.add(Request(prompt_of(17, 3), Limits(2)))
    gained = [[gain.row.key for gain in engine.step()] for _ in range(10)]
    assert gained == [[first], []] * 4 + [[first], [first + 1]], "five pieces, a step before each"
    assert engine.stats().reading == 0


@pytest.mark.usefixtures("short_pieces")
def test_a_text_that_is_cancelled_while_it_is_read_leaves_its_row_and_no_trace() -> None:
    engine = Engine(TARGET(), tree_of_each(), max_rows=4)
    keys = {engine.add(request(number)): number for number in (1, 7, 8)}
    gone = engine.add(Request(prompt_of(17, 1), Limits(5)))
    behind = engine.add(Request(prompt_of(11, 2), Limits(4)))
    written: dict[int, list[int]] = {}
    while not engine.idle:
        if engine.stats().reading and any(row.key == gone for row in engine._reading):
            engine.cancel(gone)
        for gain in engine.step():
            written.setdefault(gain.row.key, []).extend(gain.tokens)
    assert gone not in written
    assert {key: written[key] for key in keys} == {key: alone(number) for key, number in keys.items()}
    single = Engine(TARGET(), NoDrafter())
    single.add(Request(prompt_of(11, 2), Limits(4)))
    assert written[behind] == run(single)[0]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows grow by eight columns."""
    for module in ("model.cache", "decode.memory", "decode.rows"):
        monkeypatch.setattr(f"medusa_cli.{module}.BLOCK", 8)


@pytest.mark.usefixtures("small_blocks")
def test_a_text_for_which_there_is_no_memory_now_waits_and_is_not_overtaken() -> None:
    engine = Engine(TARGET(), oracle(), max_rows=4, columns=130)
    small, big = Request(prompt_of(5), Limits(6)), Request(prompt_of(17), Limits(6))
    assert columns_for(TARGET(), 11, 40) == 56
    assert columns_for(TARGET(), 23, 40) == 64
    first, second = engine.add(small), engine.add(small)
    engine.step()
    assert (engine.stats().held, engine.stats().free) == (112, 18)
    third, late = engine.add(big), [engine.add(small) for _ in range(3)]
    joined = []
    while not engine.idle:
        for gain in engine.step():
            joined += [gain.row.key] * (gain.row.key not in joined)
        held = engine._rows.cache
        assert held.num_rows * held.layers[0].capacity <= 130
    assert joined == [first, second, third, *late]


@pytest.mark.usefixtures("small_blocks")
def test_a_text_for_which_there_never_is_memory_is_refused_with_the_numbers() -> None:
    engine = Engine(TARGET(), oracle(), max_rows=4, columns=60)
    with pytest.raises(DataError, match="may grow to 23 tokens, which need 64 columns .* there is memory for 60"):
        engine.add(Request(prompt_of(17), Limits(6)))
    assert engine.idle
    key = engine.add(Request(prompt_of(11), Limits(8, context_limit=16)))
    assert run(engine)[key] == TEXTS().wanted(3, 5)[2], "what it may need is bounded by the context too"


@pytest.mark.usefixtures("small_blocks")
def test_memory_of_a_cancelled_text_is_free_at_once() -> None:
    engine = Engine(TARGET(), oracle(), max_rows=4, columns=64)
    first, second = (engine.add(Request(prompt, Limits(10))) for prompt in TEXTS().prompts[::2])
    engine.step()
    assert (engine.stats().waiting, engine.stats().free) == (1, 64 - 56)
    engine.cancel(first)
    assert (engine.stats().held, engine.stats().free) == (0, 64)
    assert run(engine) == {second: TEXTS().wanted(3, 10)[2]}


@pytest.mark.parametrize(("chunk", "columns"), [(4, None), (2048, None), (4, 150)])
@pytest.mark.usefixtures("small_blocks")
def test_arrivals_cancels_and_ends_change_no_other_text(
    chunk: int, columns: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", chunk)
    ends, cancels = arrivals(700, columns)
    assert min(ends, cancels) > 30


def arrivals(num_events: int, columns: int | None = None) -> tuple[int, int]:
    """Texts that come, end and are cancelled at random, each compared with what is written alone; ends and cancels."""
    rng = random.Random(5)
    drafter = tree_of_each()
    drafter.size = 9
    engine = Engine(TARGET(), drafter, max_rows=6, columns=columns)
    shapes: set[tuple[int, int]] = set()
    wishes: dict[int, int] = {}
    written: dict[int, list[int]] = {}
    cancelled: set[int] = set()
    ends = 0
    exact = [n for n in range(300) if not isinstance(request(n).choosing.rule, Typical)]
    while len(wishes) + len(cancelled) + ends < num_events:
        if rng.random() < 0.8 and engine.num_free > -8:
            number = rng.choice(exact)
            wishes[engine.add(request(number))] = number
        if rng.random() < 0.1 and (engine.active or engine._reading):
            key = rng.choice([*engine.active, *engine._reading]).key
            engine.cancel(key)
            cancelled.add(key)
        gains = engine.step()
        if columns is not None and engine._rows is not None:
            shapes.add((engine._rows.cache.num_rows, engine._rows.cache.layers[0].capacity))
        for gain in gains:
            assert gain.row.key not in cancelled
            written.setdefault(gain.row.key, []).extend(gain.tokens)
            if gain.row.finish_reason is not None:
                ends += 1
                assert written[gain.row.key] == alone(wishes[gain.row.key])
    for key in cancelled & set(written):
        assert written[key] == alone(wishes[key])[: len(written[key])]
    assert all(rows * held <= (columns or 0) for rows, held in shapes)
    assert columns is None or len({rows for rows, _ in shapes}) > 2, "rows come and go with what texts need"
    return ends, len(cancelled)


if __name__ == "__main__":  # python -m tests.decode.test_engine 10000
    print("ends, cancels:", arrivals(int(sys.argv[1])))
