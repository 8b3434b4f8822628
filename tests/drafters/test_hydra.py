"""Heads that see the guesses above theirs: asked level by level they say what one forward over a path says."""

from itertools import product

import pytest
import torch

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.contracts import Context, Draft
from medusa_cli.decode.loop import Parts, collect
from medusa_cli.decode.rows import Limits
from medusa_cli.drafters.beam import Walk, candidates
from medusa_cli.drafters.hydra import BEAM, HydraDrafter, guesses
from medusa_cli.drafters.mixed import Budget, GatheredDrafter
from medusa_cli.drafters.suffix import Suffixes
from medusa_cli.drafters.trie import Trie
from medusa_cli.errors import TreeError
from medusa_cli.heads.config import HydraConfig
from medusa_cli.heads.medusa import HydraHeads
from medusa_cli.trees.dynamic import DynamicShape
from medusa_cli.trees.tree import TokenTree
from tests.drafters.test_dynamic_drafter import context_of
from tests.tiny_models import NUM_NEW, known, target_of, tiny_model

HEADS, WIDTH, HIDDEN, VOCAB = 3, 12, 16, 30
PATHS = [[0], [1], [0, 0], [0, 2], [1, 1], [0, 0, 0], [1, 1, 3]]


def hydra_heads(*, num_layers: int = 2, own_output: bool = False, output: torch.Tensor | None = None) -> HydraHeads:
    output = torch.randn(VOCAB, HIDDEN) if output is None else output
    config = HydraConfig(
        num_heads=HEADS,
        num_layers=num_layers,
        hidden_size=output.shape[1],
        vocab_size=len(output),
        draft_vocab=WIDTH,
        own_output=own_output,
        output_bias=False,
        sees_root=True,
        target_name="tiny",
        target_fingerprint="x",
    )
    heads = HydraHeads.fresh(config, torch.arange(WIDTH) * 2, output)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.4)
    return heads.requires_grad_(False)


def after(heads: HydraHeads, hidden_H: torch.Tensor, path: list[int]) -> torch.Tensor:
    """What follows the root and guesses of `path`: draft logits [W] by one forward over the whole path."""
    seen = torch.tensor([*path, *[0] * (HEADS - len(path))])
    return heads(heads.inputs(hidden_H, seen))[len(path) - 1]


def path_of(draft: Draft, row: int, node: int) -> list[int]:
    """Tokens from the root to the node."""
    parents, tokens = draft.tree.parents_XN[row % len(draft.tree.parents_XN)], draft.tokens_BN[row]
    path = [int(tokens[node])]
    while node:
        node = int(parents[node])
        path.insert(0, int(tokens[node]))
    return path


@pytest.mark.parametrize("own_output", [False, True])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("packed", [False, True])
def test_levels_say_what_one_forward_over_the_path_says(num_layers: int, own_output: bool, packed: bool) -> None:
    heads = hydra_heads(num_layers=num_layers, own_output=own_output)
    hidden_BH, paths = torch.randn(2, HIDDEN), [[5, 4, 8], [7, 2, 20]]
    wanted = [[after(heads, hidden_BH[row], paths[row][: depth + 1]) for row in range(2)] for depth in range(HEADS)]
    if packed:
        heads.pack(blocks=False)
    walk = Walk(heads, hidden_BH, torch.tensor([5, 7]))
    for depth in range(HEADS):
        torch.testing.assert_close(walk.logits()[:, 0], torch.stack(wanted[depth]), atol=1e-5, rtol=1e-4)
        if depth + 1 < HEADS:
            walk.down(torch.zeros(2, 1, dtype=torch.long), torch.tensor([[path[depth + 1]] for path in paths]))


def test_a_fixed_tree_holds_the_guesses_after_each_path() -> None:
    heads, context = hydra_heads(), context_of(2, HIDDEN)
    draft = HydraDrafter(heads, TokenTree.from_paths(PATHS)).propose(context)
    assert draft.tokens_BN[:, 0].tolist() == context.root_B.tolist()
    for row in range(2):
        for node in range(1, draft.tree.num_nodes):
            *above, token = path_of(draft, row, node)
            best = after(heads, context.hidden_BH[row], above).argsort(descending=True)
            assert token == int(heads.to_target_ids(best[int(draft.tree.ranks_XN[0, node])]))


def test_a_tree_deeper_than_the_heads_is_refused() -> None:
    with pytest.raises(TreeError):
        HydraDrafter(hydra_heads(), TokenTree.chain(HEADS + 1))


def test_with_a_wide_beam_the_nodes_are_the_likeliest_of_all_paths() -> None:
    heads, context = hydra_heads(), context_of(2, HIDDEN)
    found = candidates(heads, context.hidden_BH, context.root_B, beam=WIDTH**2, num_ranks=WIDTH)
    for row in range(2):
        chances = {}
        for depth in range(1, HEADS + 1):
            for path in product(range(WIDTH), repeat=depth):
                ids = [int(context.root_B[row]), *(2 * index for index in path)]
                before = chances[path[:-1]] if depth > 1 else 0.0
                logp_W = after(heads, context.hidden_BH[row], ids[:-1]).log_softmax(-1)
                chances[path] = before + float(logp_W[path[-1]])
        best = sorted(chances.values(), reverse=True)[:20]
        torch.testing.assert_close(found.logp_BC[row].sort(descending=True).values[1:21], torch.tensor(best))


def test_the_tree_of_a_step_is_the_likeliest_candidates_with_their_parents() -> None:
    heads, context = hydra_heads(), context_of(3, HIDDEN)
    draft = HydraDrafter(heads, DynamicShape(6)).propose(context)
    found = guesses(heads, context.hidden_BH, context.root_B, 6)
    for row in range(3):
        wanted = found.logp_BC[row].sort(descending=True).values[:7]
        chances = []
        for node in range(draft.tree.num_nodes):
            path = path_of(draft, row, node)
            steps = [
                after(heads, context.hidden_BH[row], path[:n]).log_softmax(-1)[path[n] // 2]
                for n in range(1, len(path))
            ]
            chances.append(float(sum(steps)) if steps else 0.0)
        torch.testing.assert_close(torch.tensor(chances), wanted, atol=1e-5, rtol=1e-4)


def test_unlikely_candidates_are_left_out() -> None:
    heads, context = hydra_heads(), context_of(3, HIDDEN)
    draft = HydraDrafter(heads, DynamicShape(12, 0.2)).propose(context)
    found = guesses(heads, context.hidden_BH, context.root_B, 12)
    likely = (found.logp_BC >= torch.tensor(0.2).log()).sum(1)
    assert draft.tree.real_XN.sum(1).tolist() == likely.tolist()
    assert draft.tree.num_nodes == int(likely.max()) < 13


def test_no_more_than_a_beam_of_nodes_is_asked_at_a_level() -> None:
    heads, context = hydra_heads(), context_of(1, HIDDEN)
    found = guesses(heads, context.hidden_BH, context.root_B, 12)
    parents_of = [set(found.parents_BC[0, torch.tensor(found.depths_C) == depth].tolist()) for depth in (1, 2, 3)]
    assert [len(each) for each in parents_of] == [1, BEAM, BEAM]


def test_heads_are_asked_what_follows_a_guess_only_where_that_could_pay() -> None:
    heads, context = hydra_heads(), context_of(2, HIDDEN)
    everything = guesses(heads, context.hidden_BH, context.root_B, 12)
    chances_BC = everything.logp_BC.exp()
    floor = 0.9 * float(chances_BC[:, 1:].max())
    asked = guesses(heads, context.hidden_BH, context.root_B, 12, floor)
    assert len(asked.depths_C) < len(everything.depths_C)
    tries = [Trie(int(root)) for root in context.root_B]
    HydraDrafter(heads, DynamicShape(12)).add_guesses(context, tries, floor)
    for row, trie in enumerate(tries):
        wanted = sorted(chance for chance in chances_BC[row].tolist() if chance >= floor)
        assert sorted(trie.chances) == pytest.approx(wanted)
    nothing = guesses(heads, context.hidden_BH, context.root_B, 12, 1.1)
    assert max(nothing.depths_C) == 1, "the root is always asked"


@pytest.mark.parametrize("max_rows", [1, 3])
@pytest.mark.parametrize("kind", ["fixed", "dynamic", "gathered", "mixed"])
def test_the_text_is_the_plain_one(kind: str, max_rows: int) -> None:
    texts, target = known("llama"), target_of(tiny_model("llama"))
    heads = hydra_heads(output=target.output_weight)
    drafter = {
        "fixed": lambda: HydraDrafter(heads, TokenTree.from_paths(PATHS)),
        "dynamic": lambda: HydraDrafter(heads, DynamicShape(9, 0.05)),
        "gathered": lambda: GatheredDrafter([HydraDrafter(heads, DynamicShape(6))], Budget(6)),
        "mixed": lambda: GatheredDrafter([HydraDrafter(heads, DynamicShape(6)), Suffixes()], Budget(9)),
    }[kind]()
    found = collect(Parts(target, drafter, Greedy()), texts.prompts, Limits(NUM_NEW), max_rows)
    assert [each.token_ids for each in found] == texts.wanted(3)


def test_gathered_guesses_are_the_candidates() -> None:
    heads, context = hydra_heads(), context_of(2, HIDDEN)
    ours = GatheredDrafter([HydraDrafter(heads, DynamicShape(6))], Budget(6)).propose(
        Context([[1, int(root)] for root in context.root_B], context.root_B, context.hidden_BH)
    )
    theirs = HydraDrafter(heads, DynamicShape(6)).propose(context)
    for row in range(2):
        assert {tuple(path_of(ours, row, node)) for node in range(7)} == {
            tuple(path_of(theirs, row, node)) for node in range(7)
        }
