"""Training in several processes: the first takes the whole path, and calls the others when there is something to learn.

They load no target: the first one hands them the heads and what these see of the output matrix, and they read the same
store of hidden states, so it lies on a disk that all machines share.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from medusa_cli.config.recipe import Recipe, TrainSettings
from medusa_cli.heads.base import Heads
from medusa_cli.heads.config import HeadsConfig
from medusa_cli.heads.kinds import heads_class
from medusa_cli.model.loading.load import choose_device
from medusa_cli.train.checkpoint import Checkpoints
from medusa_cli.train.corpus import Corpus
from medusa_cli.train.loop import follow
from medusa_cli.train.parallel import Group, Processes, device_of
from medusa_cli.train.text_examples import examples_of


@dataclass(frozen=True)
class Task:
    """What there is to learn: samples of a store of hidden states, how, and the checkpoint to go on from."""

    store: Path
    learnt: list[int]
    settings: TrainSettings
    seed: int
    checkpoints: Checkpoints


@dataclass(frozen=True)
class _Outline:
    """Heads without numbers: shape and dtype of each tensor they hold."""

    config: HeadsConfig
    tensors: Mapping[str, tuple[torch.Size, torch.dtype]]


def call(group: Group, task: Task, heads: Heads, recipe: Recipe) -> None:
    """The first process: give the others their task and these heads, before it begins to train them itself."""
    if not isinstance(group, Processes):
        return
    if recipe.target.device_map == "auto":  # the heads are where the output matrix came to lie: maybe another's GPU
        heads.to(device_of(recipe.target, group.place))
    group.hand_out(task)
    group.hand_out(_Outline(heads.config, {name: (one.shape, one.dtype) for name, one in _tensors(heads)}))
    for _, tensor in _tensors(heads):
        group.spread(tensor)


def answer_call(group: Processes, recipe: Recipe) -> None:
    """Every other process: wait until there is something to learn, and learn until there is no more."""
    device = choose_device(device_of(recipe.target, group.place))
    task: Task = group.hand_out()
    heads = _received(group, device)
    examples = examples_of(Corpus.open(task.store), task.learnt, heads.draft_ids, heads.config)
    follow(heads, examples, task.settings, task.seed, task.checkpoints, group)


def _received(group: Processes, device: torch.device) -> Heads:
    """The first process's heads, on this device."""
    outline: _Outline = group.hand_out()
    heads = heads_class(outline.config.type)(
        outline.config, torch.zeros(outline.config.draft_vocab, dtype=torch.long)
    ).to(device)
    for name, (shape, dtype) in outline.tensors.items():
        if getattr(heads, name) is None:
            setattr(heads, name, torch.empty(shape, dtype=dtype, device=device))
    for _, tensor in _tensors(heads):
        group.spread(tensor)
    return heads


def _tensors(heads: Heads) -> Iterator[tuple[str, Tensor]]:
    """Trained and fixed numbers, those that are no part of a file included, in one order everywhere."""
    yield from heads.named_parameters()
    yield from heads.named_buffers()
