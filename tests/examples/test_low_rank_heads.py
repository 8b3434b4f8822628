"""A kind of heads of one's own, as another package brings it: this file and one entry point, no change elsewhere."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from medusa_cli.acceptance.greedy import Greedy
from medusa_cli.assemble import DrafterChoice, in_shape, load_drafter
from medusa_cli.config.recipe import HeadsSettings
from medusa_cli.decode.loop import Parts, collect
from medusa_cli.decode.rows import Limits
from medusa_cli.errors import FormatError, PartError, RecipeError
from medusa_cli.formats.native import write_heads
from medusa_cli.heads.base import Heads
from medusa_cli.heads.config import HeadsConfig
from medusa_cli.heads.kinds import heads_class
from medusa_cli.registry import read_heads
from medusa_cli.trees.files import parse_tree
from tests.cli.harness import make_model, run_here, train_args
from tests.examples.conftest import Install
from tests.tiny_models import NUM_NEW, known, target_of, tiny_model


class LowRankConfig(HeadsConfig):
    """heads.options={rank: 8} says how narrow."""

    rank: int = Field(16, ge=1, le=4096)


class LowRankHeads(Heads):
    """x + up(SiLU(down(x))) for each head, through `rank` numbers: a part of the weights of a full block."""

    describes = LowRankConfig

    def __init__(self, config: LowRankConfig, draft_ids_W: Tensor) -> None:
        super().__init__(config, draft_ids_W)
        generator = torch.Generator().manual_seed(0)
        down_KRH = torch.randn(config.num_heads, config.rank, config.hidden_size, generator=generator, device="cpu")
        self.down_weight = nn.Parameter(down_KRH / config.hidden_size**0.5)
        self.up_weight = nn.Parameter(torch.zeros(config.num_heads, config.hidden_size, config.rank))

    def inputs(self, hidden: Tensor, path: Tensor) -> Tensor:
        """The hidden state alone."""
        return hidden

    def block_forward(self, inputs: Tensor) -> Tensor:
        narrow = F.silu(torch.einsum("...h,krh->...kr", inputs, self.down_weight))
        return inputs.unsqueeze(-2) + torch.einsum("...kr,khr->...kh", narrow, self.up_weight)


@pytest.fixture(autouse=True)
def installed(install: Install) -> None:
    install("medusa.heads", "low-rank", "tests.examples.test_low_rank_heads:LowRankHeads")


def some_heads(name: str) -> Heads:
    target = target_of(tiny_model(name))
    config = LowRankConfig(
        type="low-rank", num_heads=3, hidden_size=target.hidden_size, vocab_size=target.vocab_size,
        draft_vocab=40, own_output=False, output_bias=target.output_bias is not None, target_name="tiny",
        target_fingerprint=target.fingerprint,
    )  # fmt: skip
    heads = LowRankHeads.fresh(config, torch.arange(40), target.output_weight, target.output_bias)
    torch.nn.init.normal_(heads.up_weight, generator=torch.Generator().manual_seed(1))
    return heads.requires_grad_(False)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("shape", ["chain:3", "3x2x1", "dynamic:8", "mixed"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "phi"])
def test_under_any_tree_the_text_is_the_greedy_one(name: str, shape: str, rows: int, tmp_path: Path) -> None:
    write_heads(some_heads(name), tmp_path)
    target = target_of(tiny_model(name), runner="packed")
    name_and_tree = ("mixed", None) if shape == "mixed" else (None, shape)
    choice = DrafterChoice(name_and_tree[0], str(tmp_path), name_and_tree[1], speculate="on")
    parts = Parts(target, load_drafter(choice, target), Greedy())
    found = collect(parts, known(name).prompts[:rows], Limits(NUM_NEW), max_rows=rows)
    assert [each.token_ids for each in found] == known(name).wanted(rows)


def test_they_come_back_bit_equal(tmp_path: Path) -> None:
    heads = some_heads("llama")
    write_heads(heads, tmp_path)
    found = read_heads(tmp_path, target_of(tiny_model("llama")))
    assert isinstance(found, LowRankHeads)
    assert found.config == heads.config
    assert all(torch.equal(found.state_dict()[name], value) for name, value in heads.state_dict().items())


def test_a_tree_that_asks_too_much_of_them_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="head"):
        in_shape(some_heads("llama"), parse_tree("chain:9"))


def test_without_their_package_they_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from medusa_cli.util import plugins

    write_heads(some_heads("llama"), tmp_path)
    monkeypatch.setattr(plugins, "plugins", lambda group: {})
    with pytest.raises(FormatError, match="nothing here knows heads of kind 'low-rank'; there are medusa, hydra"):
        read_heads(tmp_path, target_of(tiny_model("llama")))


def test_the_whole_path_trains_them_and_they_write_the_models_text(tmp_path: Path) -> None:
    tiny = make_model(tmp_path / "tiny")
    done = run_here(
        *train_args(
            tiny,
            tmp_path / "run",
            "--heads-type",
            "low-rank",
            "--learning-rate",
            0.02,
            "--epochs",
            60,
            "--json",
            "heads.options={rank: 8}",
        )
    )
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "run" / "heads.json").read_text())["config"]["rank"] == 8
    losses = _losses(tmp_path / "run" / "train.jsonl")
    assert min(losses) < 0.5 * losses[0], "they learn"
    done = run_here("generate", "Hi", "-m", tiny, "--heads", tmp_path / "run", "--speculate", "on", "--check", "-n", 16)
    assert done.code == 0, done.err


def test_a_setting_of_the_kind_s_own_is_held_to_what_it_may_be(tmp_path: Path) -> None:
    facts = {"hidden_size": 8, "vocab_size": 9, "draft_vocab": 9, "output_bias": False, "target_name": "x"}
    for options, told in (({"rnk": 4}, "have no setting heads.options.rnk"), ({"rank": 0}, "heads.options.rank: ")):
        settings = HeadsSettings(type="low-rank", options=options)
        with pytest.raises(RecipeError, match=told):
            LowRankConfig.of(settings, target_fingerprint="y", **facts)


def test_what_is_no_kind_of_heads_is_told_with_whose_it_is(install: Install) -> None:
    install("medusa.heads", "odd", "tests.examples.test_low_rank_heads:LowRankConfig")
    with pytest.raises(PartError, match="another-odd brings as medusa.heads: odd, is no Heads"):
        heads_class("odd")


def _losses(file: Path) -> list[float]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]
