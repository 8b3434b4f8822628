"""What the second stage of a run would do, need and take, as far as it can be told from a config and a short try."""

import math
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from medusa_cli.config.recipe import LoraSettings, Recipe
from medusa_cli.model.adapter import adaptable, count_parameters
from medusa_cli.pipeline.planning.run_memory import FLOAT

# weights, gradients and AdamW's two moments
COPIES = 4
# the target's own reading, the adapted one, and the way back, which costs two; one more with each layer computed twice
PASSES, PASSES_TWICE = 4, 5
# of a chunk's places, over the whole vocabulary: logits, probabilities and gradients of both predictions
LOGITS_HELD = 6


@dataclass(frozen=True)
class JointPlan:
    """The stage at most: its steps, the layers that are adapted, the adapter's parameters, and the bytes it needs."""

    steps_at_most: int
    layers: int
    parameters: int
    memory: int


def joint_plan(
    recipe: Recipe, lora: LoraSettings, model: Any, *, weights: int, head_parameters: int, copied: bool
) -> JointPlan:
    """The stage of this recipe. Raises RecipeError for modules that the model doesn't have.

    model            the target's, without numbers
    weights          bytes of one copy of them
    head_parameters  numbers of the heads
    copied           the target's own layers are laid out for decoding, and a copy with plain ones learns beside it
    """
    layers = adaptable(model, lora.target_modules)
    parameters = count_parameters(layers, lora.rank)
    steps = math.ceil(lora.epochs * recipe.data.num_samples * (1 - recipe.data.held_out) / lora.batch_size)
    learnt = COPIES * FLOAT * (parameters + head_parameters)
    return JointPlan(
        steps_at_most=min(steps, lora.max_steps or steps),
        layers=len(layers),
        parameters=parameters,
        # the adapted target is loaded beside the other at the end
        memory=max((1 + copied) * weights + learnt + _held(recipe, lora, model.config, layers), 2 * weights),
    )


def joint_seconds(recipe: Recipe, lora: LoraSettings, steps: int, read_token: float) -> float:
    """So many steps at the pace at which tokens are read."""
    passes = PASSES_TWICE if lora.gradient_checkpointing else PASSES
    return steps * lora.batch_size * recipe.data.max_seq_length * passes * read_token


def _held(recipe: Recipe, lora: LoraSettings, config: Any, layers: dict[str, nn.Module]) -> int:
    """Bytes of what a step holds for the way back, about: what goes into each adapted layer, for it and its adapter."""
    text = config.get_text_config()
    tokens = lora.batch_size * recipe.data.max_seq_length
    shapes: list[Any] = [(type(layer), layer.weight.shape) for layer in layers.values()]
    inputs = sum(shape[0 if kind is Conv1D else 1] for kind, shape in shapes)
    if lora.gradient_checkpointing:
        inputs = inputs // text.num_hidden_layers + text.num_hidden_layers * text.hidden_size
    places = LOGITS_HELD * recipe.train.loss_chunk * text.vocab_size
    return FLOAT * (2 * tokens * inputs + places)
