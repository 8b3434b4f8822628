"""The loop: what is handed out, and who joins whom. On a tiny llama."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.contracts import Context, Draft
from medusa_cli.decode.loop import Parts, collect, decode
from medusa_cli.decode.rows import Limits
from medusa_cli.drafters.none import NoDrafter
from medusa_cli.model import prefill
from tests.decode.tiny_llama import TARGET, TEXTS, Counter, oracle, up_to
from tests.fakes import SHAPES, RandomDrafter
from tests.tiny_models import NUM_NEW, VOCAB, final_hidden, prompt_of, tiny_model


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
    """Keeps each row's text by what it is told, as a drafter with a state per row does."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[list[int]] = []

    def join(self, first_row: int, prompts: Sequence[Sequence[int]], taps_BTLH: Tensor | None) -> None:
        assert first_row == len(self.texts)
        self.texts += [list(prompt) for prompt in prompts]

    def propose(self, context: Context) -> Draft:
        self.agrees(context)
        return super().propose(context)

    def keep(self, context: Context, taps_BDLH: Tensor | None) -> None:
        for text, tokens in zip(self.texts, context.tokens, strict=True):
            text += tokens[len(text) : -1]
        self.agrees(context)

    def move(self, source: int, row: int) -> None:
        self.texts[row] = self.texts[source]

    def drop(self, row: int) -> None:
        del self.texts[row]

    def agrees(self, context: Context) -> None:
        assert self.texts == [tokens[:-1] for tokens in context.tokens]


def test_a_drafter_is_told_whenever_the_rows_are_no_longer_the_same() -> None:
    stops = frozenset({TEXTS().answers[0][3], TEXTS().answers[2][6]})
    prompts = [*TEXTS().prompts, *TEXTS().prompts]
    found = collect(Parts(TARGET(), RowWatcher(), Greedy()), prompts, Limits(9, stops), max_rows=3)
    assert [each.token_ids for each in found] == [up_to(answer, stops) for answer in TEXTS().wanted(3, 9) * 2]


@pytest.mark.parametrize(("join_at", "prefilled"), [(1, [3, 1, 1, 1]), (2, [3, 2, 1]), (3, [3, 3])])
def test_rows_join_when_enough_are_free(join_at: int, prefilled: list[int], counter: Counter) -> None:
    lengths = {answer[0]: length for answer, length in zip(TEXTS().answers, (3, 7, 9), strict=True)}

    def of_these_lengths() -> Callable[[Sequence[int]], int | None]:
        told: list[int] = []

        def find_stop(new: Sequence[int]) -> int | None:
            told.extend(new)
            return len(new) if len(told) == lengths[told[0]] else None

        return find_stop

    limits = Limits(NUM_NEW, new_finder=of_these_lengths)
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


@pytest.mark.parametrize(("lengths", "budget", "columns"), [((5, 20), 60, 128), ((5, 90), 60, 256), ((5,), 4000, 640)])
def test_there_is_room_for_what_texts_may_become(
    lengths: Sequence[int], budget: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    target = TARGET()
    made = target.new_cache
    monkeypatch.setattr(
        target, "new_cache", lambda rows, capacity: asked.append((rows, capacity)) or made(rows, capacity)
    )
    prompts = [[1] * length for length in lengths]
    next(decode(Parts(target, NoDrafter(), Greedy()), prompts, Limits(budget), max_rows=2))
    assert asked == [(2, columns)]


def test_reading_a_long_prompt_is_told_piece_by_piece_and_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [prompt_of(30), prompt_of(3)]
    whole = collect(Parts(TARGET(), NoDrafter(), Greedy()), prompts, Limits(8), max_rows=2)
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", 8)
    told: list[tuple[int, int]] = []
    parts = Parts(TARGET(), NoDrafter(), Greedy(), on_read=lambda read, unread: told.append((read, unread)))
    assert collect(parts, prompts, Limits(8), max_rows=2) == whole
    assert told == [(8, 33), (16, 33), (24, 33), (30, 33), (33, 33)]
