"""Guesses gathered from several sources: any text stays what it is, and nodes are drafted as far as they pay."""

import pytest
import torch

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.contracts import Context
from medusa_cli.decode.loop import Parts, collect
from medusa_cli.decode.rows import Limits
from medusa_cli.drafters.medusa import MedusaDrafter
from medusa_cli.drafters.mixed import Budget, GatheredDrafter, Source
from medusa_cli.drafters.purse import LEARNING, PLAIN_EVERY
from medusa_cli.drafters.step_costs import Lap, LapTimes, Pace
from medusa_cli.drafters.suffix import Suffixes
from medusa_cli.drafters.trie import Trie
from medusa_cli.trees.dynamic import DynamicShape
from tests.drafters.test_dynamic_drafter import context_of, random_heads
from tests.tiny_models import NUM_NEW, known, prompt_of, target_of, tiny_model

STEEP = {1: 1.0, 2: 1.3, 4: 2.0, 8: 5.0}


def steep() -> Pace:
    """Confirmed by an earlier run."""
    return sure(STEEP)


def sure(costs: dict[int, float]) -> Pace:
    return Pace(costs, costs)


def after_plain_steps(budget: Budget, rows: int = 1) -> Budget:
    """The first steps of a run are plain, and those of a number of rows."""
    for _ in range(LEARNING):
        assert budget.is_plain(rows)
        assert budget.num_nodes([[]] * rows) == 0
        budget.saw(rows, rows, Lap(budget.pace.seconds(rows), 1.0))
    return budget


def step(budget: Budget, chances: list[float], costs: dict[int, float], tokens: float = 1.0) -> int:
    """One step of one row: its guesses."""
    count = 0 if budget.is_plain(1) else budget.num_nodes([chances])
    budget.saw(1 + count, 1, Lap(Pace(costs).seconds(1 + count), tokens if count else 1.0))
    return count


def sources(kind: str, target) -> list[Source]:
    heads = MedusaDrafter(random_heads(target), DynamicShape(6))
    return {"ngram": [Suffixes()], "heads": [heads], "mixed": [heads, Suffixes()]}[kind]


@pytest.mark.parametrize("max_rows", [1, 2, 3])
@pytest.mark.parametrize("paced", [False, True])
@pytest.mark.parametrize("kind", ["ngram", "heads", "mixed"])
def test_the_text_is_the_plain_one_whatever_was_gathered(kind: str, paced: bool, max_rows: int) -> None:
    texts, target = known("llama"), target_of(tiny_model("llama"))
    drafter = GatheredDrafter(sources(kind, target), Budget(7, steep() if paced else None))
    found = collect(Parts(target, drafter, Greedy()), texts.prompts, Limits(NUM_NEW), max_rows)
    assert [each.token_ids for each in found] == texts.wanted(3)
    assert max(size for each in found for size in each.num_nodes) <= 8


def test_a_text_that_repeats_itself_is_copied_in_long_steps() -> None:
    target = target_of(tiny_model("qwen2"))
    prompt = prompt_of(9) * 4
    (plain,) = collect(Parts(target, GatheredDrafter([Suffixes()], Budget(1)), Greedy()), [prompt], Limits(40))
    loop = [*prompt, *plain.token_ids] + plain.token_ids[-8:] * 4
    (found,) = collect(Parts(target, GatheredDrafter([Suffixes()], Budget(10)), Greedy()), [loop], Limits(20))
    (wanted,) = collect(Parts(target, GatheredDrafter([Suffixes()], Budget(1)), Greedy()), [loop], Limits(20))
    assert found.token_ids == wanted.token_ids
    assert found.num_steps <= wanted.num_steps


def test_the_heads_paths_are_those_of_the_dynamic_tree() -> None:
    target = target_of(tiny_model("llama"))
    heads, context = random_heads(target), context_of(3, target.hidden_size)
    ours = GatheredDrafter([MedusaDrafter(heads, DynamicShape(6))], Budget(6)).propose(context)
    theirs = MedusaDrafter(heads, DynamicShape(6)).propose(context)
    for row in range(3):
        assert texts_of(ours, row) == texts_of(theirs, row)


def texts_of(draft, row: int) -> set[tuple[int, ...]]:
    parents, tokens = draft.tree.parents_XN[row].tolist(), draft.tokens_BN[row].tolist()
    found: list[tuple[int, ...]] = [()]
    for node in range(1, len(parents)):
        found.append((*found[parents[node]], tokens[node]))
    return set(found)


def test_nodes_are_drafted_as_far_as_they_pay() -> None:
    likely, unsure = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3], [0.2, 0.05, 0.04, 0.03]
    assert Budget(6).num_nodes([likely]) == 6
    assert after_plain_steps(Budget(6, steep())).num_nodes([likely]) == 3
    assert after_plain_steps(Budget(6, steep())).num_nodes([unsure]) == 0
    assert after_plain_steps(Budget(6, steep())).num_nodes([[]]) == 0


@pytest.mark.parametrize("kind", ["ngram", "heads"])
def test_guesses_that_can_not_pay_are_not_looked_for(kind: str) -> None:
    target = target_of(tiny_model("llama"))
    prompt = prompt_of(6) * 4
    context = Context([prompt], torch.tensor([prompt[-1]]), context_of(1, target.hidden_size).hidden_BH)
    (source,) = sources(kind, target)
    source.join(0, [prompt[:-1]], None)
    all_of_them, floored = Trie(prompt[-1]), Trie(prompt[-1])
    source.add_guesses(context, [all_of_them], 0.0)
    floor = sorted(all_of_them.chances)[len(all_of_them.chances) // 2]
    source.add_guesses(context, [floored], floor)
    assert 1 < len(floored.chances) < len(all_of_them.chances)
    assert sorted(floored.chances) == sorted(chance for chance in all_of_them.chances if chance >= floor)


def test_the_floor_rises_with_what_a_node_costs_and_falls_with_what_guesses_are_worth() -> None:
    assert Budget(6).floor(1) == 0.0
    budget = Budget(6, steep())
    at_first = budget.floor(1)
    assert 0 < at_first < 1
    assert Budget(6, sure({1: 1.0, 8: 1.7})).floor(1) < at_first
    floors = []
    for _ in range(50):
        step(budget, [0.9], STEEP)
        floors.append(budget.floor(1))
    assert max(floors[-5:]) > at_first, "guesses that never come true must be surer to pay"


@pytest.mark.parametrize("costs", [STEEP, {1: 26.0, 2: 26.8, 4: 28.5, 5: 31.7, 8: 49.0, 16: 75.0}, {1: 1.0, 7: 1.6}])
def test_the_floor_leaves_out_nothing_that_would_be_drafted(costs: dict[int, float]) -> None:
    budget = Budget(6, sure(costs))
    for falling in range(1, 100):
        chances = [0.9 * (falling / 100) ** place for place in range(6)]
        drafted = chances[: budget._best(budget.pace, [chances], 6)]
        assert all(chance >= budget.floor(1) for chance in drafted)


def test_rows_share_a_step_and_its_cost() -> None:
    flat_then_steep = {1: 1.0, 2: 1.01, 4: 1.02, 5: 3.0}
    chances = [0.5, 0.4, 0.3]
    assert after_plain_steps(Budget(3, sure(flat_then_steep))).num_nodes([chances]) == 3
    assert after_plain_steps(Budget(3, sure(flat_then_steep)), rows=2).num_nodes([chances, chances]) == 1


def test_what_is_fast_already_asks_more_of_a_node() -> None:
    budget = after_plain_steps(Budget(6, steep()))
    assert budget.num_nodes([[0.35]]) == 1
    for _ in range(500):
        budget.pace.saw(1, 1, Lap(1.0, 3.0), guesses=False)
    assert budget.num_nodes([[0.35]]) == 0
    assert budget.num_nodes([[0.95]]) == 1


def test_chances_that_never_come_true_are_believed_less_and_tried_again_later() -> None:
    budget = Budget(6, steep())
    drafted = [step(budget, [0.9, 0.8, 0.7], STEEP) > 0 for _ in range(2000)]
    late = drafted[1000:]
    assert sum(late) < 0.1 * len(late), "guesses that are always wrong are mostly left out"
    assert any(late), "and tried again"


def test_plain_steps_come_first_and_now_and_then_whatever_pays() -> None:
    flat = {1: 1.0, 4: 1.0}
    budget = Budget(3, sure(flat))
    counts = [step(budget, [0.9, 0.9, 0.9], flat, 4.0) for _ in range(20 * PLAIN_EVERY)]
    plain = [step for step, count in enumerate(counts) if not count]
    assert plain[:LEARNING] == list(range(LEARNING))
    assert plain[LEARNING] < 10
    assert plain[-1] - plain[-2] == PLAIN_EVERY
    assert set(counts) == {0, 3}


def test_a_draft_tells_the_budget_what_the_step_before_took_and_brought() -> None:
    # when a step begins, and before and after its source is asked
    times = iter([10.0, 11.0, 12.0, 13.0, 13.5, 16.0, 16.0, 16.0])
    drafter = GatheredDrafter([Suffixes()], Budget(6, steep()), clock=lambda: next(times))
    seen, saw = [], drafter.budget.saw
    drafter.budget.saw = lambda *step: (seen.append(step), saw(*step))
    tokens = [1, 2, 3, 1, 2]
    context = Context([tokens], torch.tensor([2]), torch.zeros(1, 4))
    drafter.join(0, [tokens[:-1]], None)
    for _ in range(LEARNING + 1):
        draft = drafter.propose(context)
    tokens += [3, 1, 2, 3]
    drafter.propose(Context([tokens], torch.tensor([3]), torch.zeros(1, 4)))
    assert draft.tree.num_nodes > 1
    plain = (1, 1, Lap(1.0, 0.0, near=True))
    assert seen == [plain, plain, (draft.tree.num_nodes, 1, Lap(4.0, 4.0, near=True, asked=0.5))]


def test_what_steps_took_after_short_texts_of_one_row_is_kept_for_the_next_run() -> None:
    times = LapTimes()
    for seconds in (3.0, 1.0, 2.0):
        times.add(1, Lap(seconds, 1.0, near=True))
        times.add(2, Lap(9.0, 1.0, near=False))
    times.add(4, Lap(7.0, 1.0, near=True))
    assert times.medians() == {1: 2.0}, "one step says nothing of its size, and far ones nothing at all"
