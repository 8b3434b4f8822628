"""Law 1 at every end: whoever guesses, and however far a step would go, a text ends where plain decoding ends it.

Its ids, its reason, its counters, what is streamed and what the cache holds all end together, in every row.
"""

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.acceptance.logits_processors import Shaping, shaping_of
from medusa_cli.acceptance.lossless import Lossless
from medusa_cli.contracts import AcceptanceRule, Step
from medusa_cli.decode import loop
from medusa_cli.decode.loop import Generation, Parts, collect, decode, generation_of
from medusa_cli.decode.rows import Limits, Rows
from medusa_cli.decode.stop_strings import StopStrings
from medusa_cli.decode.text import TextStream
from medusa_cli.drafters.none import NoDrafter
from medusa_cli.model.target import Target
from tests.decode.test_ends import letters
from tests.real_drafters import DEPTH, REAL
from tests.tiny_models import SAMPLED, SEED, Known, counting_model, known, prompt_of, sampled, target_of, tiny_model

LONGEST = 12
OFFSETS = range(2 * DEPTH + 3)  # every place of two steps, the prefill's token before them and the first place after
SOME = (0, 2, 5)
PERIOD = 7


@dataclass(frozen=True)
class End:
    """What ends texts."""

    stop_ids: frozenset[int] = frozenset()
    stop_text: str | None = None
    max_new: int = LONGEST
    context: int | None = None


@dataclass(frozen=True)
class Texts:
    """A target, a rule, prompts, and what plain decoding writes after them when nothing ends it."""

    target: Target
    rule: AcceptanceRule
    prompts: Sequence[Sequence[int]]
    answers: Sequence[Sequence[int]]
    shaping: Shaping | None = None

    @property
    def whole(self) -> list[list[int]]:
        """Prompt and answer together: the guesses go on past every end."""
        return [[*prompt, *answer] for prompt, answer in zip(self.prompts, self.answers, strict=True)]

    def parts(self, drafter: str) -> Parts:
        return Parts(self.target, REAL[drafter](self.target, self.whole), self.rule, self.shaping, SEED)


def of_known(rule: AcceptanceRule, texts: Known) -> Texts:
    return Texts(cached_target(), rule, texts.prompts, texts.answers)


cached_target = functools.cache(lambda: target_of(tiny_model("llama")))


@functools.cache
def greedy() -> Texts:
    return of_known(Greedy(), known("llama"))


@functools.cache
def drawn() -> Texts:
    return of_known(Lossless(*SAMPLED), sampled("llama"))


@functools.cache
def counted() -> Texts:
    """Texts that n-grams know by heart."""
    prompts = [
        [place % PERIOD for place in range(start, start + length)] for start, length in ((2, 16), (5, 9), (0, 1))
    ]
    answers = [[(prompt[-1] + place) % PERIOD for place in range(1, 40)] for prompt in prompts]
    return Texts(target_of(counting_model(PERIOD)), Greedy(), prompts, answers)


def spelled(ids: Sequence[int]) -> str:
    """The text of the ids, as `letters` decodes them: two characters each."""
    return "".join(f"{chr(97 + token // 10)}{token % 10}" for token in ids)


ENDS: dict[str, Callable[[Texts, int], End]] = {
    "stop_id": lambda texts, place: End(frozenset(answer[place] for answer in texts.answers)),
    "several_stop_ids": lambda texts, place: End(
        frozenset({texts.answers[0][place], texts.answers[0][place + 2], texts.answers[1][place + 1]})
    ),
    "stop_string": lambda texts, place: End(stop_text=spelled(texts.answers[0])[2 * place + 1 : 2 * place + 4]),
    "stop_string_on_a_stop_id": lambda texts, place: End(
        frozenset({texts.answers[0][place + 1]}), spelled(texts.answers[0])[2 * place + 1 : 2 * place + 4]
    ),
    "budget": lambda texts, place: End(max_new=place + 1),
    "context": lambda texts, place: End(context=max(map(len, texts.prompts)) + place + 1),
    "none": lambda texts, place: End(max_new=LONGEST + place),
}


def plain(answer: Sequence[int], num_prompt: int, end: End) -> tuple[list[int], str]:
    """Ids and reason of a text that would go on as `answer`, worked out without the loop."""
    budget = min(end.max_new, (end.context or 10**9) - num_prompt)
    places = [place + 1 for place, token in enumerate(answer) if token in end.stop_ids]
    if end.stop_text is not None and end.stop_text in spelled(answer):
        places.append(math.ceil((spelled(answer).index(end.stop_text) + len(end.stop_text)) / 2))
    stop = min(places, default=10**9)
    return (list(answer[:stop]), "stop") if stop <= budget else (list(answer[:budget]), "length")


class CacheLengths:
    """After each step the cache holds every row's text but its last token, which is decided and not read."""

    def after(self, rows: Rows, step: Step) -> None:
        assert rows.cache.lengths[: len(rows.active)] == [len(row.tokens) - 1 for row in rows.active]


@pytest.fixture(autouse=True)
def _watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "watching", lambda target: nullcontext([CacheLengths()]))


def assert_ends(texts: Texts, drafter: str, end: End, max_rows: int = 2) -> list[Generation]:
    """All that is written and told ends where plain decoding ends it; the third row joins when one has left."""
    stops = [] if end.stop_text is None else [end.stop_text]
    limits = Limits(end.max_new, end.stop_ids, end.context, StopStrings(stops, letters()).finder if stops else None)
    streams = [TextStream(letters(), stops) for _ in texts.prompts]
    shown, gained = ([""] * len(streams), [[] for _ in streams])
    found: dict[int, Generation] = {}
    for gain in decode(texts.parts(drafter), texts.prompts, limits, max_rows):
        key = gain.row.key
        shown[key] += streams[key].feed(gain.tokens)
        gained[key] += gain.tokens
        assert len(gain.tokens) == len(gain.hidden_TH)
        if gain.row.finish_reason is not None:
            found[key] = generation_of(gain.row)
    for key, (prompt, answer) in enumerate(zip(texts.prompts, texts.answers, strict=True)):
        ids, reason = plain(answer, len(prompt), end)
        assert (found[key].token_ids, found[key].finish_reason) == (ids, reason)
        assert gained[key] == ids
        assert shown[key] + streams[key].flush() == spelled(ids).partition(end.stop_text or "\0")[0]
        assert sum(found[key].kept) == len(ids) - 1
        assert found[key].num_steps == len(found[key].kept) == len(found[key].num_nodes)
    return list(found.values())


@pytest.mark.parametrize("place", OFFSETS)
@pytest.mark.parametrize("end", ENDS)
def test_a_step_that_would_go_on_is_cut_at_every_place(end: str, place: int) -> None:
    for found in assert_ends(greedy(), "perfect", ENDS[end](greedy(), place)):
        assert found.num_steps == math.ceil((len(found.token_ids) - 1) / (DEPTH + 1))


@pytest.mark.parametrize("drafter", ["mixed", "hydra_mixed", "watched"])
@pytest.mark.parametrize("end", ENDS)
def test_whoever_guesses_texts_end_alike(end: str, drafter: str) -> None:
    for place in SOME:
        assert_ends(greedy(), drafter, ENDS[end](greedy(), place))


@pytest.mark.parametrize("end", ENDS)
def test_what_is_copied_from_the_text_ends_alike(end: str) -> None:
    for place in SOME:
        assert_ends(counted(), "ngram", ENDS[end](counted(), place))


def test_copies_are_kept_in_long_steps() -> None:
    assert max(max(one.kept) for one in assert_ends(counted(), "ngram", End(max_new=20))) == 9


@pytest.mark.parametrize("drafter", ["perfect", "mixed"])
@pytest.mark.parametrize("end", ENDS)
def test_sampled_texts_end_alike(end: str, drafter: str) -> None:
    for place in SOME:
        assert_ends(drawn(), drafter, ENDS[end](drawn(), place))


@functools.cache
def put_off(min_new: int, rule: AcceptanceRule, stops: frozenset[int]) -> Texts:
    """Texts that may not end before `min_new` tokens, written on as if nothing ended them."""
    settings = {"min_new_tokens": min_new}
    shaping = shaping_of(settings, stops, torch.device("cpu"))
    prompts = greedy().prompts
    parts = Parts(cached_target(), NoDrafter(), rule, shaping, SEED)
    answers = [each.token_ids for each in collect(parts, prompts, Limits(LONGEST + 2 * DEPTH), max_rows=3)]
    return Texts(cached_target(), rule, prompts, answers, shaping)


@pytest.mark.parametrize("drafter", ["perfect", "mixed", "hydra_mixed"])
@pytest.mark.parametrize("min_new", [2, 5, 8])
def test_an_end_that_was_put_off_comes_where_it_then_would(min_new: int, drafter: str) -> None:
    stops = frozenset(answer[place] for answer in greedy().answers for place in (1, 4, 7))
    texts = put_off(min_new, greedy().rule, stops)
    end = End(stops)
    found = assert_ends(texts, drafter, end)
    assert all(not stops & set(each.token_ids[:min_new]) for each in found)
    assert [list(answer[:LONGEST]) for answer in greedy().answers] != [answer[:LONGEST] for answer in texts.answers]


# --- one drafter, several runs ---


@pytest.mark.parametrize("drafter", REAL)
def test_a_drafter_that_was_left_in_the_middle_of_a_text_writes_the_next_as_a_new_one_would(drafter: str) -> None:
    # TensorRT-LLM#2263: state left over from the first prompt
    texts = greedy()
    parts = texts.parts(drafter)
    abandoned = decode(parts, [prompt_of(7, 1), prompt_of(12, 1)], Limits(LONGEST), max_rows=2)
    for _ in range(6):
        next(abandoned)
    abandoned.close()
    found = collect(parts, texts.prompts, Limits(LONGEST), max_rows=1)
    assert [each.token_ids for each in found] == [list(answer[:LONGEST]) for answer in texts.answers]
