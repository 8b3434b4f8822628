"""The block drafter: what it guesses a step after the other is what one pass over the whole text says."""

import numpy as np
import pytest
import torch

from medusa_cli.contracts import Context
from medusa_cli.drafters import block as block_module
from medusa_cli.drafters.block import BlockDrafter
from medusa_cli.drafters.block_paths import CANDIDATES, Pairs, places_of
from medusa_cli.drafters.trie import Trie
from medusa_cli.errors import TreeError
from medusa_cli.heads.block import BlockHeads, BlockInputs
from medusa_cli.heads.block_attention import Blocks
from medusa_cli.model.target import Target
from medusa_cli.trees.dynamic import DynamicShape
from medusa_cli.trees.files import parse_tree
from tests.attending import states_of
from tests.block_heads import PLACES, block_heads, chain
from tests.tiny_models import prompt_of, target_of, tiny_model

LENGTHS = (9, 4, 13)


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of(tiny_model("qwen3", num_hidden_layers=4))


def whole(heads: BlockHeads, texts: list[list[int]], model) -> torch.Tensor:
    """Draft logits [B, K, W] by the pass that training takes, after all but the last token of each text, its root."""
    states = [states_of(model, text[:-1], heads.config.taps).flatten(1) for text in texts]
    padded = torch.nn.utils.rnn.pad_sequence(states, batch_first=True)
    text_B = torch.arange(len(texts))
    blocks = Blocks.of(text_B, torch.tensor([len(text) - 2 for text in texts]))
    ids_BK = torch.tensor([text[-1] for text in texts])[:, None].expand(-1, PLACES)
    found = heads.block_forward(BlockInputs(padded, blocks, ids_BK))
    return heads.projection(0).own_logits(found[..., : heads.config.hidden_size])


def told(heads: BlockHeads, texts: list[list[int]], model, pieces: int = 1) -> BlockDrafter:
    """A drafter that has been shown the texts but their roots: the first part as prompts, the rest as kept tokens."""
    drafter = BlockDrafter(heads, DynamicShape(8))
    taps = drafter.taps
    states = [states_of(model, text[:-1], taps) for text in texts]
    cut = [len(text) - pieces for text in texts]
    padded = torch.nn.utils.rnn.pad_sequence(
        [state[:end] for state, end in zip(states, cut, strict=True)], batch_first=True, padding_value=torch.nan
    )
    drafter.join(0, [text[:end] for text, end in zip(texts, cut, strict=True)], padded)
    for behind in range(pieces - 1):
        kept = torch.stack([state[end + behind] for state, end in zip(states, cut, strict=True)])[:, None]
        tokens = [text[: end + behind + 2] for text, end in zip(texts, cut, strict=True)]
        drafter.keep(Context(tokens, torch.tensor([text[-1] for text in tokens]), torch.zeros(1)), kept)
    return drafter


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("pieces", "near"), [(1, False), (3, True)])
def test_steps_say_what_one_pass_over_the_text_says(
    target: Target, monkeypatch: pytest.MonkeyPatch, native: bool, causal: bool, pieces: int, near: bool
) -> None:
    if not native:
        monkeypatch.setattr(block_module, "can_attend", lambda: False)
    heads, texts = block_heads(target, causal=causal, near=near), [prompt_of(length) for length in LENGTHS]
    drafter = told(heads, texts, target.model, pieces)
    assert drafter._native == native
    seen = []
    monkeypatch.setattr(block_module, "places_of", lambda heads, pairs, guessed: seen.append(guessed) or [])
    roots = torch.tensor([text[-1] for text in texts])
    for _ in range(2):  # a draft leaves nothing behind
        drafter.add_guesses(Context(texts, roots, torch.zeros(1)), [], 0.0)
    wanted = whole(heads, texts, target.model)
    for guessed in seen:
        torch.testing.assert_close(heads.projection(0).own_logits(guessed), wanted, rtol=1e-3, atol=1e-3)
    later = heads.projection(0).own_logits(seen[0])
    alone = [whole(heads, [text], target.model) for text in texts]
    torch.testing.assert_close(later, torch.cat(alone), rtol=1e-3, atol=1e-3)


def test_a_block_sees_all_that_was_read_and_nothing_else(target: Target) -> None:
    heads, text = block_heads(target), prompt_of(12)
    wanted = whole(heads, [text], target.model)
    other = list(text)
    other[0] = (other[0] + 1) % 90
    assert not torch.allclose(whole(heads, [other], target.model), wanted), "the first token counts"
    longer = states_of(target.model, [*text, 5, 6], heads.config.taps).flatten(1)[None]
    blocks = Blocks.of(torch.tensor([0]), torch.tensor([len(text) - 2]))
    found = heads.block_forward(BlockInputs(longer, blocks, torch.tensor([[text[-1]] * PLACES])))
    behind = heads.projection(0).own_logits(found[..., : heads.config.hidden_size])
    torch.testing.assert_close(behind, wanted, rtol=1e-4, atol=1e-4)


def test_the_places_of_a_causal_block_do_not_see_those_behind_them(target: Target) -> None:
    for causal in (True, False):
        heads, text = block_heads(target, causal=causal), prompt_of(8)
        before = whole(heads, [text], target.model)
        heads.mask_rows[-1] += 1
        changed = (whole(heads, [text], target.model) - before).abs().amax((0, 2)) > 1e-4
        assert changed.tolist() == [not causal] * (PLACES - 1) + [True]


def by_hand(heads: BlockHeads, guessed_KH: torch.Tensor, root: int, path: list[int]) -> torch.Tensor:
    """Chances [W] after the path, by the whole vocabulary."""
    ids = [root, *path]
    behind = heads.before(torch.tensor(ids[-1]))
    place = torch.cat([guessed_KH[len(path)], behind])
    return heads.projection(0).logits(place).softmax(-1) * heads.confidence(place).sigmoid()


def test_paths_have_the_chances_that_the_whole_vocabulary_gives_them(target: Target) -> None:
    heads = block_heads(target)
    assert heads.config.draft_vocab < CANDIDATES, "so that none is left out"
    guessed_BKH = torch.randn(2, PLACES, heads.config.hidden_size, generator=torch.Generator().manual_seed(3))
    found = places_of(heads, Pairs(heads), guessed_BKH)
    for row, root in enumerate((4, 5)):  # one in the draft vocabulary, one that isn't
        trie = Trie(root)
        found[row].add_likeliest(trie, 9)
        assert len(trie.tokens) == 10
        for node in range(1, 10):
            path, at = [], node
            while at:
                path.insert(0, trie.tokens[at])
                at = trie.parents[at]
            chances = [
                by_hand(heads, guessed_BKH[row], root, path[:place])[path[place] // 2] for place in range(len(path))
            ]
            assert trie.chances[node] == pytest.approx(float(torch.stack(chances).prod()), rel=1e-3)
        best = by_hand(heads, guessed_BKH[row], root, [])
        assert trie.tokens[1] == 2 * int(best.argmax())
        assert list(trie.chances[1:]) == sorted(trie.chances[1:], reverse=True)


def test_tokens_that_are_no_candidates_count_in_the_mass(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    from medusa_cli.drafters import block_paths

    heads = block_heads(target)
    heads.output_after_weight.zero_()  # without pairs the figure is exact
    guessed_BKH = torch.randn(1, PLACES, heads.config.hidden_size, generator=torch.Generator().manual_seed(3))
    monkeypatch.setattr(block_paths, "CANDIDATES", 5)
    (few,) = places_of(heads, Pairs(heads), guessed_BKH)
    best = few.after(0, 3, 1)[0]
    wanted = by_hand(heads, guessed_BKH[0], 6, [])
    assert best.chance == pytest.approx(float(wanted.max()), rel=1e-3)


def test_nothing_below_the_floor_is_guessed(target: Target) -> None:
    heads = block_heads(target)
    guessed_BKH = torch.randn(1, PLACES, heads.config.hidden_size, generator=torch.Generator().manual_seed(3))
    (places,) = places_of(heads, Pairs(heads), guessed_BKH)
    every, few = Trie(4), Trie(4)
    places.add_likeliest(every, 30)
    floor = every.chances[8] * 0.999
    places.add_likeliest(few, 30, floor)
    assert few.chances == every.chances[: len(few.chances)]
    assert np.isclose(min(few.chances), every.chances[8])


def test_a_fixed_tree_is_filled_by_rank_along_each_path(target: Target) -> None:
    heads, texts = block_heads(target), [prompt_of(length) for length in LENGTHS]
    dynamic = told(heads, texts, target.model)
    drafter = BlockDrafter(heads, parse_tree("2x2x1"))
    drafter.cache = dynamic.cache
    roots = torch.tensor([text[-1] for text in texts])
    context = Context(texts, roots, torch.zeros(1))
    draft = drafter.propose(context)
    tree = draft.tree
    for places, tokens, root in zip(drafter._guesses(context), draft.tokens_BN.tolist(), roots.tolist(), strict=True):
        assert tokens[0] == root
        row_of = {2 * row: row for row in range(heads.config.draft_vocab)}
        for node in range(1, tree.num_nodes):
            parent, rank = int(tree.parents_XN[0, node]), int(tree.ranks_XN[0, node])
            row = row_of.get(tokens[parent], heads.config.draft_vocab)
            guesses = places.after(int(tree.depths_XN[0, node]) - 1, row, rank + 1)
            assert tokens[node] == guesses[rank].token


def test_a_tree_that_is_too_deep_is_refused(target: Target) -> None:
    heads = block_heads(target)
    assert BlockDrafter(heads, chain(heads)).size == PLACES
    with pytest.raises(TreeError, match="head 5; 4 present"):
        BlockDrafter(heads, parse_tree("1x1x1x1x1"))


@pytest.mark.parametrize("blocks", [True, False])
def test_layers_laid_out_for_the_kernels_guess_the_same(target: Target, blocks: bool) -> None:
    heads, texts = block_heads(target), [prompt_of(length) for length in LENGTHS]
    plain = whole(heads, texts, target.model)
    packed = whole(heads.pack(blocks=blocks), texts, target.model)
    torch.testing.assert_close(packed, plain, rtol=0.1 if blocks else 1e-4, atol=0.15 if blocks else 1e-4)


def test_in_bfloat16_the_library_attends_and_guesses_are_about_the_same(target: Target) -> None:
    heads, texts = block_heads(target), [prompt_of(length) for length in LENGTHS]
    context = Context(texts, torch.tensor([text[-1] for text in texts]), torch.zeros(1))
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        drafter = told(block_heads(target).to(dtype).bind(target.output_weight.to(dtype)), texts, target.model)
        assert drafter._native == (dtype == torch.float32)
        tries = [Trie(text[-1]) for text in texts]
        drafter.add_guesses(context, tries, 0.0)
        found.append([trie.chances[1] for trie in tries])
    assert heads.dtype == torch.float32
    assert found[1] == pytest.approx(found[0], rel=0.25)
