"""One engine for several callers: who asks beside others gets his text, or is told; free memory is counted at rest."""

from collections.abc import Sequence

import pytest

from medusa_cli.contracts import Drafter
from medusa_cli.decode import memory, shared_engine
from medusa_cli.decode.engine import Request
from medusa_cli.decode.memory import columns_for, free_columns
from medusa_cli.decode.rows import Limits
from medusa_cli.decode.shared_engine import SharedEngine
from medusa_cli.drafters.none import NoDrafter
from medusa_cli.errors import DataError
from tests.attending import AttendingDrafter
from tests.decode.tiny_llama import TARGET, TEXTS, oracle
from tests.tiny_models import prompt_of

LIMITS, PLAIN = Limits(6), NoDrafter()


def texts(engine: SharedEngine, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """What is written after each of them."""
    written: list[list[int]] = [[] for _ in prompts]
    for index, gain in engine.write([Request(prompt, LIMITS) for prompt in prompts]):
        written[index] += gain.tokens
    return written


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many prompts were counted for, each time that memory was looked at; there is room for 600 columns."""
    seen: list[int] = []
    monkeypatch.setattr(shared_engine, "free_columns", lambda target, prompts, *rest: seen.append(len(prompts)) or 600)
    return seen


def test_memory_is_looked_at_when_nobody_writes(counted: list[int]) -> None:
    engine = SharedEngine(TARGET(), oracle(), max_rows=3)
    wanted = TEXTS().wanted(3, 6)
    first = engine.write([Request(prompt, LIMITS) for prompt in TEXTS().prompts])
    next(first)
    assert texts(engine, TEXTS().prompts[:1]) == wanted[:1]
    assert counted == [3], "somebody was writing"
    first.close()
    assert texts(engine, TEXTS().prompts) == wanted
    assert counted == [3, 3]


def test_texts_that_do_not_fit_side_by_side_come_one_after_the_other(counted: list[int]) -> None:
    engine = SharedEngine(TARGET(), oracle(), max_rows=8)
    each = columns_for(TARGET(), max(map(len, TEXTS().prompts)) + 6, oracle().size)
    assert 600 // each < 6
    gains = engine.write([Request(prompt, LIMITS) for prompt in TEXTS().prompts * 2])
    written, most = [[] for _ in range(6)], 0
    for index, gain in gains:
        written[index] += gain.tokens
        stats = engine.stats()
        most = max(most, stats.held)
        assert stats.free is not None
        assert stats.held + stats.free == 600
    assert written == TEXTS().wanted(3, 6) * 2
    assert 0 < most <= 600


def test_a_text_that_never_fits_refuses_all_of_its_call_and_nobody_elses(counted: list[int]) -> None:
    engine = SharedEngine(TARGET(), oracle(), max_rows=3)
    wanted = TEXTS().wanted(3, 6)
    others = engine.write([Request(TEXTS().prompts[0], LIMITS)])
    written = list(next(others)[1].tokens)
    with pytest.raises(DataError, match="prompt 2 and its text .* there is memory for 600"):
        texts(engine, [TEXTS().prompts[0], prompt_of(90) * 8])
    assert engine.stats().waiting == 0
    for _, gain in others:
        written += gain.tokens
    assert written == wanted[0]


def test_columns_are_as_many_as_fit_beside_the_largest_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    def columns(free: int, drafter: Drafter = PLAIN, length: int = 5) -> int:
        monkeypatch.setattr(memory, "free_bytes", lambda device: free)
        found = free_columns(TARGET(), [prompt_of(length)], LIMITS, 2, drafter)
        assert found is not None
        return found

    assert columns(1000) == 0, "the forward alone takes more"
    roomy, twice = columns(2**26), columns(2**27)
    assert 0 < roomy < twice
    layers = TARGET().num_layers
    assert twice - roomy == pytest.approx(2**26 / (TARGET().cache_bytes_per_token * (layers + 1) / layers), rel=1e-3)
    assert columns(2**26, length=90) < roomy
    assert columns(2**26, AttendingDrafter(oracle(), (0, 1), TARGET().hidden_size)) < roomy, (
        "states of inner layers take room too"
    )


def test_where_nobody_can_tell_there_is_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: None)
    assert free_columns(TARGET(), [prompt_of(5)], LIMITS, 2, PLAIN) is None
