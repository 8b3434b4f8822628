"""Law 1 wherever hypothesis looks: any trees, any guesses, any ends, any arrivals give the text of plain decoding.

Shape letters: B rows, N tree nodes, K depths.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.contracts import Context, Draft
from medusa_cli.decode.loop import Parts, decode, generation_of
from medusa_cli.decode.rows import Limits
from medusa_cli.trees.tree import TokenTree
from tests.fakes import KnowingDrafter
from tests.tiny_models import NUM_NEW, SPARE, VOCAB, known, target_of, tiny_model

NAMES = ("llama", "mistral", "gemma3_text", "gpt2")
LENGTHS = (1, 5, 9, 17, 2, 11)
MOST_NODES = 9

cached_target = functools.cache(lambda name: target_of(tiny_model(name), "grouped" if name == "llama" else "eager"))


@dataclass(frozen=True)
class Shape:
    """Parents and whether each node is real, for each of the rows; ranks tell siblings apart."""

    parents: list[list[int]]
    real: list[list[bool]]

    def tree(self, num_rows: int) -> TokenTree:
        """A tree for every row, taken in turn, or one for all."""
        chosen = [index % len(self.parents) for index in range(num_rows if len(self.parents) > 1 else 1)]
        parents = [self.parents[index] for index in chosen]
        return TokenTree(
            torch.tensor(parents), torch.tensor([_ranks(line) for line in parents]),
            torch.tensor([self.real[index] for index in chosen]),
        )  # fmt: skip


def _ranks(parents: Sequence[int]) -> list[int]:
    """0, 1, 2, ... among the children of each node, in the order in which they stand."""
    return [parents[1:node].count(parents[node]) if node else 0 for node in range(len(parents))]


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    num_nodes = draw(st.integers(1, MOST_NODES))
    rows = draw(st.integers(1, 3))
    parents, real = [], []
    for _ in range(rows):
        line = [0, *(draw(st.integers(0, node - 1)) for node in range(1, num_nodes))]
        is_real = [True]
        for node in range(1, num_nodes):
            # padding has no children
            is_real.append(is_real[line[node]] and draw(st.booleans() if node == num_nodes - 1 else st.just(True)))
        parents.append(line)
        real.append(is_real)
    return Shape(parents, real)


class DrawnDrafter(KnowingDrafter):
    """Takes its trees, and which ranks are right, from what hypothesis drew."""

    def __init__(self, texts: Sequence[Sequence[int]], trees: Sequence[Shape], right: Sequence[int]) -> None:
        super().__init__(texts, lambda num_rows, rng: trees[self.num_steps % len(trees)].tree(num_rows))
        self.right = list(right)
        self.num_steps = 0
        self.size = MOST_NODES

    def propose(self, context: Context) -> Draft:
        draft = super().propose(context)
        self.num_steps += 1
        return draft

    def shift(self, num_rows: int, num_depths: int) -> Tensor:
        places = [
            self.right[(self.num_steps + row + depth) % len(self.right)]
            for row in range(num_rows)
            for depth in range(num_depths)
        ]
        return -torch.tensor(places, dtype=torch.long).view(num_rows, num_depths)


@st.composite
def ends(draw: st.DrawFn) -> Limits:
    stops = draw(st.frozensets(st.integers(0, VOCAB - 1), max_size=12))
    return Limits(draw(st.integers(1, NUM_NEW)), stops, draw(st.sampled_from([None, 20, 33, 96])))


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    trees=st.lists(shapes(), min_size=1, max_size=3),
    right=st.lists(st.integers(0, 3), min_size=1, max_size=7),
    limits=ends(),
    order=st.permutations(range(len(LENGTHS))),
    max_rows=st.integers(1, 4),
    join_at=st.integers(1, 4),
)
@example(
    name="llama", trees=[Shape([[0]], [[True]])], right=[0], limits=Limits(1), order=[0, 1, 2, 3, 4, 5], max_rows=4,
    join_at=4,
)  # fmt: skip
def test_any_run_writes_what_plain_decoding_writes(
    name: str,
    trees: list[Shape],
    right: list[int],
    limits: Limits,
    order: list[int],
    max_rows: int,
    join_at: int,
) -> None:
    texts = known(name, LENGTHS)
    prompts = [texts.prompts[index] for index in order]
    parts = Parts(cached_target(name), DrawnDrafter(texts.texts, trees, right), Greedy())
    found = {}
    for gain in decode(parts, prompts, limits, max_rows, min(join_at, max_rows)):
        if gain.row.finish_reason is not None:
            found[gain.row.key] = generation_of(gain.row)
    for key, index in enumerate(order):
        wanted, reason = _plain(texts.answers[index], len(texts.prompts[index]), limits)
        assert (found[key].token_ids, found[key].finish_reason) == (wanted, reason)
        assert sum(found[key].kept) == len(wanted) - 1


def _plain(answer: Sequence[int], prompt_tokens: int, limits: Limits) -> tuple[list[int], str]:
    """Where plain decoding ends the library's text, worked out from the limits alone."""
    budget = min(limits.max_new_tokens, (limits.context_limit or 10**9) - prompt_tokens)
    assert budget <= NUM_NEW + SPARE
    for place, token in enumerate(answer[:budget]):
        if token in limits.stop_ids:
            return list(answer[: place + 1]), "stop"
    return list(answer[:budget]), "length"
