"""A model's weights as they are held: how many numbers, in how many bytes, and what of them a step reads.

Linear layers hold theirs as parameters, some of them quantised, or in the layouts of medusa_cli/kernels.
"""

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from medusa_cli.kernels.blocks import BlockLinear
from medusa_cli.kernels.packed import PackedLinear
from medusa_cli.model.target import Target


def stored(parameter: Tensor) -> list[Tensor]:
    """The tensors that a parameter's numbers lie in: itself, or what torchao keeps behind it."""
    names = getattr(parameter, "tensor_data_names", None)
    return [parameter] if names is None else [getattr(parameter, name) for name in names]


def num_weights(target: Target) -> int:
    """Numbers in all weights, each once: an output matrix that is tied to the embeddings has none of its own."""
    output = target.model.get_output_embeddings()
    tied = getattr(target.config, "tie_word_embeddings", False)
    parameters = {stored(parameter)[0].data_ptr(): parameter for parameter in target.model.parameters()}
    laid_out = [layer for layer in _laid_out(target.model) if not (tied and layer is output)]
    biases = [layer.bias.numel() for layer in laid_out if layer.bias is not None]
    matrices = [layer.in_features * layer.out_features for layer in laid_out]
    return sum(map(_numbers, parameters.values())) + sum(matrices) + sum(biases)


def held_bytes(target: Target) -> int:
    """Memory that the weights take, in bytes; tied ones share it."""
    tensors = [part for parameter in target.model.parameters() for part in stored(parameter)]
    tensors += [part for layer in _laid_out(target.model) for part in _tensors(layer)]
    return _bytes({tensor.data_ptr(): tensor for tensor in tensors}.values()) + _packed_bytes(target.model)


def step_bytes(target: Target) -> int:
    """Bytes of weights that a step over a few nodes reads: of the embeddings none, unless the output shares them."""
    readers = [module for module in target.model.modules() if not isinstance(module, nn.Embedding)]
    parameters = [parameter for module in readers for parameter in module.parameters(recurse=False)]
    tensors = [part for parameter in parameters for part in stored(parameter)]
    tensors += [part for layer in _laid_out(target.model) for part in _tensors(layer)]
    return _bytes(tensors) + _packed_bytes(target.model)


def _laid_out(model: Any) -> list[PackedLinear]:
    """Layers whose weights are no parameters any more."""
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


def _tensors(layer: PackedLinear) -> list[Tensor]:
    """What such a layer holds beside a packed weight, whose bytes only its shape tells."""
    held = [layer.blocks.stored] if isinstance(layer, BlockLinear) else []
    return held if layer.bias is None else [*held, layer.bias]


def _packed_bytes(model: Any) -> int:
    return sum(
        layer.in_features * layer.out_features * layer.packed.dtype.itemsize
        for layer in _laid_out(model)
        if layer.packed is not None
    )


def _numbers(parameter: Tensor) -> int:
    """Numbers a parameter stands for: a quantised one holds several in a byte."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else math.prod(state.shape)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
