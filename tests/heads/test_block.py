"""Block heads: what they may be, how they begin, and that they come back from a folder as they were."""

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from medusa_cli.config.recipe import HeadsSettings
from medusa_cli.errors import HeadsMismatch, RecipeError
from medusa_cli.formats.native import NativeFormat, write_heads
from medusa_cli.heads.block import BlockHeads, BlockInputs
from medusa_cli.heads.block_attention import Blocks
from medusa_cli.heads.block_config import BlockConfig, spread
from medusa_cli.heads.start import take_over
from medusa_cli.model.target import Target
from tests.block_heads import PLACES, block_config, block_heads
from tests.tiny_models import target_of, tiny_model


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of(tiny_model("llama", num_hidden_layers=4))


def some_inputs(heads: BlockHeads, length: int = 6) -> BlockInputs:
    rng = torch.Generator().manual_seed(7)
    states = torch.randn(2, length, len(heads.config.taps) * heads.config.tap_size, generator=rng)
    blocks = Blocks.of(torch.tensor([1, 0, 1]), torch.tensor([length - 1, 2, 0]))
    ids = torch.randint(90, (3, heads.config.num_heads), generator=rng)
    return BlockInputs(states, blocks, ids)


def equal(one: BlockHeads, other: BlockHeads) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("layers", "taps"), [(30, (2, 9, 15, 22, 28)), (12, (2, 4, 6, 8, 10)), (4, (2,)), (2, (1,)), (1, (0,))]
)
def test_layers_are_spread_over_the_depth(layers: int, taps: tuple[int, ...]) -> None:
    assert spread(layers) == taps


def test_the_sizes_follow_from_the_target_s() -> None:
    facts = {"hidden_size": 576, "tap_size": 576, "vocab_size": 9, "draft_vocab": 9, "output_bias": False}
    config = BlockConfig.of(
        HeadsSettings(type="block"), num_layers_seen=30, target_name="x", target_fingerprint="y", **facts
    )
    found = config.query_heads, config.key_heads, config.head_size, config.inner_size
    assert found == (9, 3, 64, 1536)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"taps": "1,x"}, "names no layers"),
        ({"taps": "1,9"}, "there is no 9; the target has the numbers 0 to 4"),
        ({"taps": "1,1"}, "heads.options.taps: .*named twice"),
        ({"rank": 0}, "heads.options.rank: "),
        ({"key_heads": 3}, "can't share"),
        ({"rnk": 4}, "have no setting heads.options.rnk"),
        ({"causal": "maybe"}, "heads.options.causal: "),
    ],
)
def test_options_that_can_t_be_are_told_by_name(target: Target, options: dict[str, object], told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        block_config(target, **options)


def test_an_output_of_their_own_is_refused(target: Target) -> None:
    with pytest.raises(RecipeError, match="own_output can't be true"):
        BlockConfig.of(
            HeadsSettings(type="block", own_output=True), hidden_size=32, tap_size=32, num_layers_seen=4, vocab_size=97,
            draft_vocab=9, output_bias=False, target_name="x", target_fingerprint="y",
        )  # fmt: skip


def test_untrained_blocks_are_alike_and_guess_no_token_for_sure(target: Target) -> None:
    one, other = (BlockHeads.fresh(block_config(target), torch.arange(40) * 2, target.output_weight) for _ in range(2))
    assert equal(one, other)
    inputs = some_inputs(one)
    own = one.block_forward(inputs)[..., : one.config.hidden_size]
    root = torch.nn.functional.rms_norm(target.output_weight[inputs.ids_BK[:, :1]], (target.hidden_size,))
    assert torch.nn.functional.cosine_similarity(own, root, dim=-1).abs().max() < 0.6
    assert torch.equal(one.confidence(one.block_forward(inputs)), torch.zeros(3, PLACES))


def test_the_output_begins_at_the_size_of_the_target_s_states(target: Target) -> None:
    heads = BlockHeads.fresh(block_config(target), torch.arange(40) * 2, target.output_weight)
    heads.start_at(torch.full((5, target.hidden_size), -3.0).half())
    torch.testing.assert_close(heads.out_gain, torch.full((target.hidden_size,), 3.0))


def test_a_block_s_place_among_others_of_its_text_changes_nothing(target: Target) -> None:
    heads = block_heads(target)
    inputs = some_inputs(heads)
    together = heads.block_forward(inputs)
    for row in range(3):
        text = int(inputs.blocks.text_B[row])
        alone = BlockInputs(
            inputs.states_STX[text : text + 1, : int(inputs.blocks.place_B[row]) + 1],
            Blocks.of(torch.tensor([0]), inputs.blocks.place_B[row : row + 1]),
            inputs.ids_BK[row : row + 1],
        )
        torch.testing.assert_close(heads.block_forward(alone)[0], together[row], rtol=1e-4, atol=1e-4)


def test_the_token_before_a_place_changes_its_chances_and_no_others(target: Target) -> None:
    heads = block_heads(target)
    inputs = some_inputs(heads)
    ids = inputs.ids_BK.clone()
    ids[:, 2] = (ids[:, 2] + 1) % 90
    before = heads(inputs)
    after = heads(BlockInputs(inputs.states_STX, inputs.blocks, ids))
    changed = (before - after).abs().amax((0, 2)) > 1e-4
    assert changed.tolist() == [False, False, True, False]


def test_they_come_back_bit_equal(target: Target, tmp_path: Path) -> None:
    heads = block_heads(target, causal=True, taps="0,3,4")
    write_heads(heads, tmp_path)
    back = NativeFormat().read(tmp_path)
    assert isinstance(back, BlockHeads)
    assert equal(heads, back)
    assert back.config == heads.config
    assert back.config.wanted_taps == (0, 3, 4)
    inputs = some_inputs(heads)
    assert torch.equal(back.bind(target.output_weight)(inputs), heads(inputs))


@pytest.mark.parametrize("crash", ["describe", "rename"])
def test_a_kill_leaves_the_old_heads_or_the_new(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: str
) -> None:
    old, new = block_heads(target), block_heads(target, rank=4)
    write_heads(old, tmp_path)
    replace = os.replace

    def broken(source: str, destination: str) -> None:
        if str(destination).endswith("heads.json") == (crash == "describe"):
            raise KeyboardInterrupt
        replace(source, destination)

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(KeyboardInterrupt):
        write_heads(new, tmp_path)
    monkeypatch.undo()
    assert equal(NativeFormat().read(tmp_path), new if crash == "rename" else old)


def test_a_model_with_another_output_matrix_is_refused(target: Target) -> None:
    with pytest.raises(HeadsMismatch, match="97 x 32, this model's is 96 x 32"):
        block_heads(target).bind(torch.zeros(96, 32))


def test_they_go_on_from_others_of_their_kind(target: Target) -> None:
    source, heads = block_heads(target), block_heads(target)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.zero_()
    found = take_over(heads, source)
    assert not found.new
    assert equal(heads, source)


def by_layout(folder: Path, states: np.ndarray, root: int, before: int, output: np.ndarray) -> np.ndarray:
    """The last place's logits [W] of a block after states [T, X], read by the layout alone with json and struct."""
    data = (folder / "heads.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, config = json.loads(data[8 : 8 + length]), json.loads((folder / "heads.json").read_text())["config"]

    def tensor(name: str) -> np.ndarray:
        start, end = header[name]["data_offsets"]
        kind = {"F32": np.float32, "I32": np.int32}[header[name]["dtype"]]
        return np.frombuffer(data[8 + length + start : 8 + length + end], kind).reshape(header[name]["shape"])

    def normed(x: np.ndarray, gain: np.ndarray | float = 1.0) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + np.finfo(np.float32).eps) * gain

    width, queries, keys = config["head_size"], config["query_heads"], config["key_heads"]

    def turned(x: np.ndarray, first: int) -> np.ndarray:
        """x [T, heads * E]."""
        x = x.reshape(len(x), -1, width)
        angles = (first + np.arange(len(x)))[:, None] * config["rope_theta"] ** -(np.arange(0, width, 2) / width)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        one, other = x[..., : width // 2], x[..., width // 2 :]
        return np.concatenate([one * cos - other * sin, other * cos + one * sin], -1)

    even = normed(states.reshape(len(states), len(config["taps"]), -1)).reshape(len(states), -1)
    context = normed(even @ tensor("fuse_weight").T, tensor("context_gain"))
    x = np.concatenate([normed(output[root])[None] * 0.02, tensor("mask_rows")])
    if config["near"]:
        x = x + tensor("near_weight") @ context[-1]
    for layer in range(config["num_layers"]):
        matrix = tensor("attention_weight")[layer]
        inner = normed(x, tensor("attention_gain")[layer])
        query = turned(inner @ matrix[: queries * width].T, len(states))
        parts = [matrix[queries * width :][: keys * width], matrix[(queries + keys) * width :]]
        key = np.concatenate([turned(context @ parts[0].T, 0), turned(inner @ parts[0].T, len(states))])
        value = np.concatenate([context, inner]) @ parts[1].T
        seen = []
        for head in range(queries):
            group = head // (queries // keys)
            scores = query[:, head] @ key[:, group].T / width**0.5
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            shares /= shares.sum(-1, keepdims=True)
            seen.append(shares @ value.reshape(len(value), keys, width)[:, group])
        x = x + np.concatenate(seen, -1) @ tensor("merge_weight")[layer].T
        gate, up = np.split(normed(x, tensor("feed_gain")[layer]) @ tensor("feed_weight")[layer].T, 2, axis=-1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ tensor("down_weight")[layer].T
    ids = tensor("draft_ids")
    row = {int(token): number for number, token in enumerate(ids)}.get(before, len(ids))
    pair = tensor("output_after_weight") @ tensor("output_before_weight")[row]
    return output[ids] @ normed(x, tensor("out_gain"))[-1] + pair


@pytest.mark.parametrize(("before", "near"), [(4, True), (5, False)])  # in the draft vocabulary, and outside
def test_a_reader_written_to_the_layout_gets_the_same_logits(
    target: Target, tmp_path: Path, before: int, near: bool
) -> None:
    heads = block_heads(target, near=near)
    write_heads(heads, tmp_path)
    rng = torch.Generator().manual_seed(3)
    states = torch.randn(7, len(heads.config.taps) * heads.config.tap_size, generator=rng)
    ids = torch.tensor([[9, 3, 3, before]])
    ours = heads(BlockInputs(states[None], Blocks.of(torch.tensor([0]), torch.tensor([6])), ids))[0, -1]
    theirs = by_layout(tmp_path, states.numpy(), 9, before, target.output_weight.numpy())
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=2e-3, atol=2e-3)
