"""Heads and an adapter learning together: where they begin, what changes and what does not, and how they go on."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from medusa_cli.config.recipe import LoraSettings, TrainSettings
from medusa_cli.errors import TrainingError
from medusa_cli.heads.config import MedusaConfig
from medusa_cli.heads.medusa import MedusaHeads
from medusa_cli.model.adapter import LearningAdapter
from medusa_cli.model.target import Target
from medusa_cli.train.checkpoint import Checkpoints, RunIdentity, TrainLog, TrainState
from medusa_cli.train.corpus import Examples
from medusa_cli.train.joint.events import JointEvent, JointOutlets, JointSettings, heads_weight
from medusa_cli.train.joint.loop import JointTexts, Learners, train_joint
from medusa_cli.train.loss import score
from medusa_cli.train.order import Order
from tests.run_folders import log_of
from tests.tiny_models import target_of, tiny_model

HEADS = 3
TRAIN = TrainSettings(loss_chunk=16, eval_steps=2, save_steps=2)


def lora(**changes: Any) -> LoraSettings:
    values = {"rank": 4, "alpha": 8, "dropout": 0.1, "batch_size": 3, "max_steps": 4, "epochs": 100}
    return LoraSettings(**{**values, "learning_rate": 3e-3, "heads_learning_rate": 3e-3, **changes})


def heads_for(target: Target) -> MedusaHeads:
    """Heads that have learnt something."""
    config = MedusaConfig(
        num_heads=HEADS, num_layers=1, hidden_size=target.hidden_size, vocab_size=target.vocab_size,
        draft_vocab=target.vocab_size, own_output=False, output_bias=False, sees_root=True, target_name="tiny",
        target_fingerprint=target.fingerprint,
    )  # fmt: skip
    heads = MedusaHeads.fresh(config, torch.arange(target.vocab_size), target.output_weight)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return heads


class Joint:
    """One run of the stage in a folder, and everything it heard."""

    def __init__(self, folder: Path, texts: JointTexts, settings: LoraSettings, seed: int = 7) -> None:
        self.target = target_of(tiny_model("llama"))
        self.texts, self.settings, self.folder = texts, settings, folder
        self.adapter = LearningAdapter(self.target.model, settings, seed)
        self.heads = heads_for(self.target)
        self.seed = seed
        self.events: list[JointEvent] = []
        self.on_event: Callable[[JointEvent], None] = self.events.append

    def run(self, stop_after: int | None = None) -> JointEvent:
        learners = Learners(self.target, self.adapter, self.heads)
        checkpoints = Checkpoints(self.folder, RunIdentity("recipe", "abc"))
        outlets = JointOutlets(
            self.on_event, TrainLog(self.folder), stop_asked=lambda: stop_after in {event.step for event in self.events}
        )
        settings = JointSettings(self.settings, TRAIN, self.seed)
        return train_joint(learners, self.texts, settings, checkpoints, outlets)

    def numbers(self) -> dict[str, torch.Tensor]:
        return {**self.heads.state_dict(), **self.adapter.parameters}

    def log(self) -> list[dict]:
        return log_of(self.folder)


def stored_score(heads: MedusaHeads, examples: Examples, rows_N: np.ndarray) -> float:
    """The heads' loss on the hidden states as they are stored: what the first stage minimised."""
    inputs_BI = heads.inputs(examples.hidden(rows_N), examples.paths(rows_N))
    return float(score(heads, inputs_BI, examples.labels(rows_N), head_decay=TRAIN.head_decay, chunk=16).loss)


def test_the_first_step_s_loss_is_that_of_the_heads_alone_on_the_same_places(texts: JointTexts, tmp_path: Path) -> None:
    joint = Joint(tmp_path, texts, lora(max_steps=1))
    samples = texts.train.samples
    batch = [samples[index] for index in Order(len(samples), 3, 7).rows(0)]
    held_out = texts.held_out.examples
    alone = stored_score(joint.heads, texts.train.examples, texts.train.read(batch).rows_N)
    alone_held_out = stored_score(joint.heads, held_out, np.arange(len(held_out)))
    joint.run()
    begun, first = joint.events[:2]
    assert (begun.kind, begun.step, first.kind, first.step) == ("eval", 0, "train", 1)
    # states are stored in 16 bits
    assert first.loss == pytest.approx(alone, rel=1e-4)
    assert begun.loss == pytest.approx(alone_held_out, rel=1e-4)
    assert begun.divergence == first.divergence == 0
    assert begun.agreement == first.agreement == 1


def test_a_text_read_without_its_prompt_would_not_give_that_loss(texts: JointTexts, tmp_path: Path) -> None:
    bare = JointTexts(replace(texts.train, prompts={}), replace(texts.held_out, prompts={}))
    joint = Joint(tmp_path, bare, lora(max_steps=1))
    held_out = texts.held_out.examples
    alone = stored_score(joint.heads, held_out, np.arange(len(held_out)))
    joint.run()
    assert joint.events[0].loss != pytest.approx(alone, rel=1e-3)


def test_heads_and_adapter_change_and_nothing_of_the_target(texts: JointTexts, tmp_path: Path) -> None:
    joint = Joint(tmp_path, texts, lora())
    before = {name: value.detach().clone() for name, value in joint.numbers().items()}
    joint.run()
    moved = {name for name, value in joint.numbers().items() if not torch.equal(value, before[name])}
    assert {"weight", "bias", "root_weight"} <= moved
    assert {name for name in before if "lora_B" in name} <= moved
    joint.adapter.remove()
    stock = tiny_model("llama").state_dict()
    after = joint.target.model.state_dict()
    assert stock.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in stock.items())


def test_the_heads_learn_more_when_the_target_may_move(texts: JointTexts, tmp_path: Path) -> None:
    losses = {}
    for weight in (0.0, 5.0):
        joint = Joint(
            tmp_path / str(weight), texts, lora(max_steps=30, heads_weight=weight, heads_warmup=0, keep_weight=0.1)
        )
        joint.run()
        losses[weight] = [event for event in joint.events if event.kind == "train"][-1]
    assert losses[5.0].loss < losses[0.0].loss
    assert losses[5.0].divergence > losses[0.0].divergence


def test_a_larger_keep_weight_keeps_more_of_the_target_s_own_words(texts: JointTexts, tmp_path: Path) -> None:
    far = {}
    for weight in (0.01, 20.0):
        joint = Joint(
            tmp_path / str(weight), texts, lora(max_steps=15, keep_weight=weight, heads_weight=1.0, heads_warmup=0)
        )
        far[weight] = joint.run().divergence
    assert 0 < far[20.0] < far[0.01]


@pytest.mark.parametrize(("kind", "step"), [("eval", 0), ("train", 1), ("save", 2), ("train", 3), ("eval", 4)])
def test_a_run_that_was_stopped_ends_bit_equal_to_an_unbroken_one(
    texts: JointTexts, tmp_path: Path, kind: str, step: int
) -> None:
    whole = Joint(tmp_path / "whole", texts, lora())
    whole.run()
    broken = Joint(tmp_path / "broken", texts, lora())

    def die(event: JointEvent) -> None:
        if (event.kind, event.step) == (kind, step):
            raise KeyboardInterrupt

    broken.on_event = die
    with pytest.raises(KeyboardInterrupt):
        broken.run()
    torch.manual_seed(12345)
    resumed = Joint(tmp_path / "broken", texts, lora())
    last = resumed.run()
    expected = whole.numbers()
    assert all(torch.equal(value, expected[name]) for name, value in resumed.numbers().items())
    assert last.loss == [event for event in whole.events if event.kind == "eval"][-1].loss
    assert resumed.log() == whole.log()


def test_a_run_that_is_asked_to_stop_saves_the_step_it_is_at_and_ends_bit_equal(
    texts: JointTexts, tmp_path: Path
) -> None:
    whole = Joint(tmp_path / "whole", texts, lora())
    whole.run()
    stopped = Joint(tmp_path / "stopped", texts, lora())
    with pytest.raises(KeyboardInterrupt):
        stopped.run(stop_after=3)
    assert [(event.kind, event.step) for event in stopped.events[-1:]] == [("train", 3)]
    resumed = Joint(tmp_path / "stopped", texts, lora())
    resumed.run()
    assert resumed.events[0].step == 4
    assert resumed.log() == whole.log(), "a stop leaves no trace"
    expected = whole.numbers()
    assert all(torch.equal(value, expected[name]) for name, value in resumed.numbers().items())


def test_a_run_that_is_asked_to_stop_at_its_last_step_has_ended(texts: JointTexts, tmp_path: Path) -> None:
    assert Joint(tmp_path, texts, lora()).run(stop_after=4).step == 4


def test_a_save_is_told_once_when_the_run_is_killed_before_the_news_of_it(
    texts: JointTexts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Checkpoints.save

    def killed(self: Checkpoints, step: int, state: TrainState) -> Path:
        real(self, step, state)
        raise KeyboardInterrupt

    broken = Joint(tmp_path, texts, lora())
    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            broken.run()
    again = Joint(tmp_path, texts, lora())
    again.run()
    assert [line["step"] for line in again.log() if line["kind"] == "save"] == [2, 4]


def test_what_the_first_stage_laid_out_changes_nothing(texts: JointTexts, tmp_path: Path) -> None:
    plain, packed = (Joint(tmp_path / name, texts, lora()) for name in ("plain", "packed"))
    # of a matrix that is not the target's any more
    packed.heads.bind(torch.randn_like(packed.target.output_weight)).pack_output().bind(packed.target.output_weight)
    for joint in (plain, packed):
        joint.run()
    expected = plain.numbers()
    assert all(torch.equal(value, expected[name]) for name, value in packed.numbers().items())


def test_a_step_draws_no_random_number_that_others_miss(texts: JointTexts, tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(4)
    joint = Joint(tmp_path, texts, lora(max_steps=2))
    torch.manual_seed(5)
    joint.run()
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("where", ["heads", "adapter"])
def test_a_loss_that_is_not_a_number_stops_before_anything_changes(
    texts: JointTexts, tmp_path: Path, where: str
) -> None:
    joint = Joint(tmp_path, texts, lora())
    parameters = list(joint.heads.parameters()) if where == "heads" else list(joint.adapter.parameters.values())

    def spoil(event: JointEvent) -> None:
        if (event.kind, event.step) == ("train", 1):
            with torch.no_grad():
                parameters[0].view(-1)[0] = torch.nan

    joint.on_event = spoil
    with pytest.raises(TrainingError, match="step 2 of heads and adapter: the loss is not finite on text-") as caught:
        joint.run()
    assert "lora.learning_rate" in caught.value.hint


def test_one_bad_text_is_named_alone(texts: JointTexts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joint = Joint(tmp_path, texts, lora(max_steps=2))
    samples = texts.train.samples
    bad = [samples[index] for index in Order(len(samples), 3, 7).rows(0)][1]
    first = texts.train.prompts[f"text-{bad}"][0]
    read = joint.target.read

    def spoilt(ids_BT: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        rows = (ids_BT[:, 0] == first)[:, None, None]
        return read(ids_BT, lengths).masked_fill(rows, torch.nan)

    monkeypatch.setattr(joint.target, "read", spoilt)
    with pytest.raises(TrainingError) as caught:
        joint.run()
    assert caught.value.message == f"step 1 of heads and adapter: the loss is not finite on text-{bad}"
    assert not (tmp_path / "checkpoints").exists()


def test_the_weight_of_the_heads_loss_rises_from_nothing_to_its_peak() -> None:
    weights = [heads_weight(step, 100, lora(heads_weight=0.4, heads_warmup=0.5)) for step in range(100)]
    assert weights[0] == 0
    assert weights == sorted(weights)
    assert weights[50:] == [0.4] * 50
    assert weights[25] == pytest.approx(0.4 * 0.5**0.5)
    assert heads_weight(0, 100, lora(heads_warmup=0)) == lora().heads_weight
