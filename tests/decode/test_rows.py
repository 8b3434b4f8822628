"""Rows: what may be taken, where a path is cut, and who moves when a row is finished. No model."""

from collections.abc import Sequence

import pytest
import torch

from medusa_cli.contracts import Draft, Seen, Verdict
from medusa_cli.decode.rows import Limits, Row, Rows
from medusa_cli.drafters.none import NoDrafter
from medusa_cli.model.cache import TreeCache
from medusa_cli.trees.tree import TokenTree

PROMPT = [90, 91, 92]


def row_of(limits: Limits, new: Sequence[int] = (), key: int = 0) -> Row:
    return Row(key, [*PROMPT, *new], len(PROMPT), limits)


@pytest.mark.parametrize(("limit", "budget"), [(None, 10), (100, 10), (13, 10), (12, 9), (4, 1), (3, 0), (2, -1)])
def test_the_budget_is_what_both_the_user_and_the_context_allow(limit: int | None, budget: int) -> None:
    assert Limits(10, context_limit=limit).budget(3) == budget


@pytest.mark.parametrize("budget", range(1, 9))
@pytest.mark.parametrize("size", [1, 3, 6])
def test_a_row_takes_exactly_its_budget(budget: int, size: int) -> None:
    row, offered = row_of(Limits(budget)), list(range(30))
    while row.finish_reason is None:
        taken = len(row.new_tokens)
        assert row.take(offered[taken : taken + size]) == min(size, budget - taken)
    assert row.new_tokens == offered[:budget]
    assert row.finish_reason == "length"


def test_a_row_ends_with_the_first_stop_id() -> None:
    row = row_of(Limits(20, frozenset({5, 7})))
    assert row.take([1, 2, 3]) == 3
    assert row.take([4, 7, 5, 6]) == 2
    assert row.new_tokens == [1, 2, 3, 4, 7]
    assert row.finish_reason == "stop"


def test_a_stop_id_in_the_prompt_stops_nothing() -> None:
    row = row_of(Limits(20, frozenset({PROMPT[0]})))
    assert row.take([1, 2]) == 2
    assert row.finish_reason is None


def test_a_stop_id_on_the_last_place_of_the_budget_is_a_stop() -> None:
    row = row_of(Limits(3, frozenset({5})))
    row.take([1, 2, 5, 6])
    assert (row.new_tokens, row.finish_reason) == ([1, 2, 5], "stop")


def test_a_stop_id_past_the_budget_is_not_seen() -> None:
    row = row_of(Limits(2, frozenset({5})))
    row.take([1, 2, 5])
    assert (row.new_tokens, row.finish_reason) == ([1, 2], "length")


@pytest.mark.parametrize(("text_stop", "wanted"), [(1, [8]), (2, [8, 5]), (None, [8, 5])])
def test_the_earlier_of_stop_id_and_stop_string_ends_the_row(text_stop: int | None, wanted: list[int]) -> None:
    asked = []

    def find_stop(new: Sequence[int]) -> int | None:
        asked.append(list(new))
        return text_stop if len(asked) > 1 else None

    row = row_of(Limits(20, frozenset({5}), new_finder=lambda: find_stop))
    row.take([1, 2])
    row.take([8, 5, 9])
    assert (row.new_tokens[2:], row.finish_reason) == (wanted, "stop")
    assert asked == [[1, 2], [8, 5]], "a stop string is looked for in the answer, up to the first stop id"


# --- rows of one run ---


def rows_of(limits: Limits, roots: Sequence[int]) -> Rows:
    """Rows with these roots, whose hidden states are their keys."""
    rows = Rows(TreeCache(0, len(roots) + 1, 0))
    rows.cache.commit(slice(0, len(roots)), [len(PROMPT)] * len(roots))
    hidden_B1H = torch.arange(len(roots), dtype=torch.float)[:, None, None].expand(-1, 1, 4)
    seen = Seen(hidden_B1H, torch.zeros(len(roots), 1, 1))
    rows.admit([row_of(limits, key=key) for key in range(len(roots))], seen, torch.tensor(roots))
    return rows


TREE = TokenTree.from_paths([[0], [1], [0, 0], [1, 0]])
SEEN = Seen(torch.empty(0), torch.zeros(9, TREE.num_nodes, 1))
TOKENS = [0, 11, 12, 13, 14]


def draft_of(rows: Rows) -> Draft:
    tokens_BN = torch.tensor([TOKENS] * len(rows.active))
    tokens_BN[:, 0] = rows.context.root_B
    return Draft(tokens_BN, TREE)


def step(rows: Rows, paths: list[list[int]], following: list[int]) -> list[list[int]]:
    """One step in which these paths survive; node n of row b has the hidden state 10 b + n."""
    draft = draft_of(rows)
    path_BD = torch.tensor([path + [-1] * (3 - len(path)) for path in paths])
    verdict = rows.limit(Verdict(path_BD, (path_BD >= 0).sum(-1), torch.tensor(following)), draft, SEEN)
    rows.cache.keep(verdict)
    numbers_BN = 10.0 * torch.arange(len(paths))[:, None] + torch.arange(5)
    seen = Seen(numbers_BN[..., None].expand(-1, -1, 4), SEEN.logits_BNV)
    return [list(new) for new in rows.advance(draft, verdict, seen).tokens]


def test_a_step_gains_the_guesses_and_the_token_after_them() -> None:
    rows = rows_of(Limits(20), [1, 2, 3])
    assert step(rows, [[0], [0, 2, 4], [0, 1]], [51, 52, 53]) == [[51], [12, 14, 52], [11, 53]]
    assert [row.new_tokens for row in rows.active] == [[1, 51], [2, 12, 14, 52], [3, 11, 53]]
    assert rows.context.root_B.tolist() == [51, 52, 53]
    assert [row.kept for row in rows.active] == [[1], [3], [2]]
    assert [row.num_nodes for row in rows.active] == [[5], [5], [5]]


def test_the_cache_holds_all_but_the_root() -> None:
    rows = rows_of(Limits(20), [1, 2])
    for _ in range(3):
        step(rows, [[0], [0, 2, 4]], [51, 52])
    assert rows.cache.lengths[:2] == [len(row.tokens) - 1 for row in rows.active]


def test_the_deepest_kept_node_s_hidden_state_decided_the_root() -> None:
    rows = rows_of(Limits(20), [1, 2, 3])
    assert rows.context.hidden_BH[:, 0].tolist() == [0, 1, 2]
    step(rows, [[0], [0, 2, 4], [0, 1]], [51, 52, 53])
    assert rows.context.hidden_BH[:, 0].tolist() == [0, 14, 21]
    accepted_BDH = rows.context.accepted_hidden_BDH
    assert accepted_BDH[1, :, 0].tolist() == [10, 12, 14]
    assert accepted_BDH[2, :2, 0].tolist() == [20, 21]


@pytest.mark.parametrize(
    ("limits", "gained"),
    [
        (Limits(2), [11]),
        (Limits(3), [11, 13]),
        (Limits(20, frozenset({11})), [11]),
        (Limits(20, frozenset({13})), [11, 13]),
        (Limits(20, frozenset({51})), [11, 13, 51]),
    ],
)
def test_a_path_is_cut_where_its_row_ends(limits: Limits, gained: list[int]) -> None:
    rows = rows_of(limits, [1])
    assert step(rows, [[0, 1, 3]], [51]) == [gained]
    # the last token gained is decided and not forwarded: the root takes its place in the count
    assert rows.active[0].kept == [len(gained)]
    assert rows.cache.lengths[0] == len(PROMPT) + len(gained)
    assert rows.active[0].finish_reason is not None


def test_a_root_that_ends_the_text_finishes_its_row_at_once() -> None:
    rows = rows_of(Limits(20, frozenset({2})), [1, 2])
    assert [row.finish_reason for row in rows.active] == [None, "stop"]
    assert [row.key for row in rows.retire(NoDrafter())] == [1]
    assert [row.key for row in rows.active] == [0]


@pytest.mark.parametrize(
    ("finished", "left"),
    [([], [0, 1, 2, 3]), ([3], [0, 1, 2]), ([0], [3, 1, 2]), ([0, 1], [2, 3]), ([1, 3], [0, 2]), ([0, 1, 2, 3], [])],
)
def test_the_last_rows_fill_the_holes_that_finished_ones_leave(finished: list[int], left: list[int]) -> None:
    roots = [5 if key in finished else key + 50 for key in range(4)]
    rows = rows_of(Limits(20, frozenset({5})), roots)
    for key in range(4):
        rows.cache.commit(slice(key, key + 1), [key])
    assert sorted(row.key for row in rows.retire(NoDrafter())) == finished
    assert [row.key for row in rows.active] == left
    # roots, hidden states and columns move together
    assert rows.root_B.tolist() == [key + 50 for key in left]
    assert rows.hidden_BH[:, 0].tolist() == left
    assert rows.cache.lengths == [len(PROMPT) + key for key in left] + [0] * (5 - len(left))


def test_the_states_along_a_path_move_with_their_row() -> None:
    rows = rows_of(Limits(20, frozenset({5})), [1, 2, 3])
    step(rows, [[0], [0, 2, 4], [0, 1]], [5, 52, 53])
    rows.retire(NoDrafter())
    assert [row.key for row in rows.active] == [2, 1]
    accepted_BDH = rows.context.accepted_hidden_BDH
    assert accepted_BDH[0, :2, 0].tolist() == [20, 21]
    assert accepted_BDH[1, :, 0].tolist() == [10, 12, 14]


def test_rows_that_join_stand_behind_those_that_stay() -> None:
    rows = rows_of(Limits(20), [1, 2])
    step(rows, [[0], [0, 2, 4]], [51, 52])
    seen = Seen(torch.full((1, 1, 4), 7.0), torch.zeros(1, 1, 1))
    rows.admit([row_of(Limits(20), key=2)], seen, torch.tensor([3]))
    assert rows.context.root_B.tolist() == [51, 52, 3]
    assert rows.context.hidden_BH[:, 0].tolist() == [0, 14, 7]
    assert rows.context.accepted_hidden_BDH is None
    assert [list(tokens)[len(PROMPT) :] for tokens in rows.context.tokens] == [[1, 51], [2, 12, 14, 52], [3]]


@pytest.mark.parametrize(
    ("prompts", "lent"),
    [
        ([[90, 91, 92, 2, 12, 14, 52, 60]], 6),  # 52 is decided and not in the cache
        ([[90, 91, 92, 2, 12, 7], [90, 91, 92, 2, 12, 8, 9]], 5),
        ([[90, 91, 92, 2, 12, 7], [90, 91, 92, 2, 12]], 4),  # a prompt's last token is always read
        ([[90, 91, 92, 7, 8]], 0),  # too short to pay
        ([[90, 91, 92, 2, 12, 7], [50, 91, 92, 2, 12, 7]], 0),
    ],
)
def test_the_rows_that_join_begin_with_what_an_active_row_shares_with_all(prompts: list[list[int]], lent: int) -> None:
    rows = rows_of(Limits(20), [1, 2])
    step(rows, [[0], [0, 2, 4]], [51, 52])
    rows.cache = grown(rows.cache, 2 + len(prompts))
    rows.lend_prefix([Row(9, prompt, len(prompt), Limits(20)) for prompt in prompts], all_of_it)
    assert rows.cache.lengths == [4, 6, *[lent] * len(prompts)]


def all_of_it(prompt: int, length: int, wanted: int) -> int:
    return length


def grown(cache: TreeCache, num_rows: int) -> TreeCache:
    more = TreeCache(0, num_rows, 0)
    more.commit(slice(0, 2), cache.lengths[:2])
    return more


def test_nothing_is_lent_where_nobody_is_active() -> None:
    rows = Rows(TreeCache(0, 1, 0))
    rows.lend_prefix([row_of(Limits(20), new=[1, 2, 3])], all_of_it)
    assert rows.cache.lengths == [0]
