"""Memory that a run needs, stage by stage, counted on a model without numbers; knows no folder and starts nothing."""

import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from medusa_cli.recipe import Recipe

FLOAT = 4
# while heads learn: weights, gradients and two moments; a checkpoint is put together in memory without the gradients
TRAINED_COPIES, SAVED_COPIES = 4, 3
# [places, heads, hidden] while a piece of a step is learnt from: sums of both inputs, their sum, its SiLU, the blocks,
# and the gradients of the last three; each further layer keeps its sums and adds as much again in gradients
FIRST_LAYER, FURTHER_LAYER = 8, 4
# logits, softmax, and what its gradient is multiplied from
LOGITS = 3
# NF4: half a byte, and a float32 for each block of 64
BYTES_IN_4_BITS = 0.5 + 4 / 64


@dataclass(frozen=True)
class Model:
    """Numbers of a model: all of them (tied ones once), its linear layers' without the output, the output matrix's."""

    numbers: int
    linear: int
    output: int
    tied: bool

    def bytes(self, itemsize: int, *, in_4_bits: bool) -> int:
        """As the library holds them."""
        if not in_4_bits:
            return self.numbers * itemsize
        return int((self.numbers - self.linear) * itemsize + self.linear * BYTES_IN_4_BITS)

    def held(self, itemsize: int, *, in_4_bits: bool, packed: bool) -> int:
        """As they are held from then on: packed, a tied output matrix is a copy of the embeddings."""
        extra = self.output * itemsize if packed and self.tied else 0
        return self.bytes(itemsize, in_4_bits=in_4_bits) + extra


def model_of(config: Any) -> Model:
    """Counted on a model of this config that has shapes alone."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    output = model.get_output_embeddings()
    linear = sum(
        module.weight.numel()
        for module in model.modules()
        if isinstance(module, torch.nn.Linear) and module is not output
    )
    tied = output.weight is model.get_input_embeddings().weight
    numbers = sum(parameter.numel() for parameter in model.parameters())
    return Model(numbers, linear, output.weight.numel(), tied)


def base_bytes() -> int:
    """What Python and the libraries take: all that is resident of this process, which has yet to load a model."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="ascii").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return taken if sys.platform == "darwin" else taken * 1024


def learning_bytes(recipe: Recipe, hidden: int, vocab: int, parameters: int, *, packed: bool) -> int:
    """What training adds to the target: heads, what the optimizer keeps, the rows they see, and a piece of a step.

    packed   whether a shared output is copied into the layout of the CPU's kernels
    """
    heads, train = recipe.heads, recipe.train
    width = min(heads.draft_vocab or vocab, vocab)
    rows = 0 if heads.own_output else width * hidden * FLOAT * ((width < vocab) + packed)
    places = min(train.micro_batch_size or train.batch_size, train.batch_size)
    inputs = 1 + (heads.num_heads if heads.type == "hydra" else 1 if heads.sees_root else 0)
    blocks = (FIRST_LAYER + FURTHER_LAYER * (heads.num_layers - 1)) * heads.num_heads
    piece = places * hidden * FLOAT * (2 * inputs + blocks) + LOGITS * train.loss_chunk * width * FLOAT
    # a decode has a copy of the heads, and patience the best ones
    copies = TRAINED_COPIES + bool(train.decode_steps) + bool(train.patience)
    return rows + FLOAT * parameters * copies + max(piece, SAVED_COPIES * FLOAT * parameters)
