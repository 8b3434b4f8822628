"""A tiny model of an architecture with random weights, and the texts that the library writes with it."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.tiny_models import greedy_of

SEED = 11
SHARPNESS = 1.5  # spread of what a matrix gives back: sharp attention, far apart logits
SMALL = 0.1  # gains and biases move a little
VOICES = (1.0, 0.2, 0.04, 0.008, 5.0)
"""How loud embeddings are beside what layers add. Too loud, and a model with a tied matrix repeats itself for ever."""
PROBE, VARIED = 16, 8  # so many tokens are tried, so many of them should be different


def random_model(config: Any, attention: str = "eager", voice: float = 1.0) -> Any:
    """A model of its own, config included, in eval mode, float32: the same numbers for the same config."""
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention, dtype=torch.float32)
    rng = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=rng)
            by_size = SHARPNESS * noise / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else None
            parameter.copy_(parameter + SMALL * noise if by_size is None else by_size)
        model.get_input_embeddings().weight.mul_(voice)
    if model.generation_config is not None:  # texts go on to their budget
        model.generation_config.eos_token_id = None
    return model.eval().requires_grad_(False)


def telling_voice(config: Any, prompt: Sequence[int]) -> float:
    """The first voice in which the model's text wanders over the vocabulary, so that a fault shows in it."""
    tried: dict[float, int] = {}
    for voice in VOICES:
        tried[voice] = len(set(library_text(random_model(config, voice=voice), prompt, PROBE)))
        if tried[voice] >= VARIED:
            return voice
    return max(tried, key=lambda voice: tried[voice])


def library_text(model: Any, prompt: Sequence[int], num_new: int) -> list[int]:
    """The new ids of `generate`, by a copy of the model: some rope tables remember the texts before."""
    return greedy_of(copy.deepcopy(model), prompt, num_new)
