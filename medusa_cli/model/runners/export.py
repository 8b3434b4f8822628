"""A model's forward over a few nodes as a graph: stock modelling code, exported over a twin that holds no big weights.

The twin's linear layers and its attention call kernels/graph.py; weights, cache and tree are inputs of the graph.
Shape letters: T nodes of all rows, I inputs, O outputs of a layer.
"""

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from medusa_cli.kernels import graph
from medusa_cli.kernels.blocks import BlockLinear
from medusa_cli.model.taps import LayerInputs

MOST_TOKENS = 4096  # nodes of all rows
SMALL = 8  # numbers of a tensor; the compiler writes tensors up to this size into the program
# of the forward that is exported: any number that is neither 0 nor 1, which would be taken literally
EXAMPLE_TOKENS = 4


class CannotExport(Exception):
    """Why a model can't be turned into a graph, in words."""


def export(model: Any, mask_kinds: Sequence[str] | None) -> "torch.export.ExportedProgram":
    """The graph of a forward over any number of nodes from 2 to MOST_TOKENS.

    mask_kinds   kinds of layers when the model picks its masks out of a mapping, else None

    Raises CannotExport for models that can't be turned into a graph.
    """
    inputs = _Inputs()
    num_layers = model.config.get_text_config().num_hidden_layers
    with torch.device("meta"):
        given = (
            torch.zeros(1, EXAMPLE_TOKENS, dtype=torch.long),
            torch.zeros(1, EXAMPLE_TOKENS, dtype=torch.long),
            torch.zeros(len(linear_layers(model)), graph.WEIGHTS_NUMBERS, dtype=torch.long),
            torch.zeros(graph.PLACE_NUMBERS + graph.LAYER_NUMBERS * num_layers, dtype=torch.long),
        )
    num_tokens = {1: torch.export.Dim("num_tokens", min=2, max=MOST_TOKENS)}
    with torch.no_grad():
        try:
            forward = _Forward(_twin(model, inputs), inputs, mask_kinds)
            forward(*given)  # on no numbers: which layers read one tensor
            _give_numbers(forward.twin, model)
            return torch.export.export(
                forward,
                tuple(torch.zeros_like(each, device="cpu") for each in given),
                dynamic_shapes=(num_tokens, num_tokens, None, None),
                strict=False,
            )
        except Exception as error:  # modelling code of any origin is run on symbols here, and fails in its own ways
            first = str(error).strip().partition("\n")[0]
            raise CannotExport(f"{type(model).__name__} can't be turned into a graph: {first[:200]}") from error


def small_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Tensors whose numbers become a part of the program, by name, in the order of the names."""
    held = dict([*model.named_parameters(), *model.named_buffers()])
    held |= {f"{name}.bias": layer.bias for name, layer in linear_layers(model) if layer.bias is not None}
    return {name: held[name] for name in sorted(held) if held[name].numel() <= SMALL}


def linear_layers(model: nn.Module) -> list[tuple[str, BlockLinear]]:
    """The layers that read blocks, by name, in the model's order."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, BlockLinear)]


class _Inputs:
    """What one traced forward is given, and what its linear layers learn about each other.

    weights, place   the tables of kernels/graph.py
    joined           by the first of layers that read one tensor: the outputs of each, in the order of the table
    """

    weights: Tensor
    place: Tensor

    def __init__(self) -> None:
        self.joined: dict[int, list[int]] = {}
        self._read: Tensor | None = None
        self._first = 0
        self._products: Tensor | None = None

    def note(self, index: int, x: Tensor, outputs: int) -> None:
        """Layer `index` reads x: it joins those before it if they read the same."""
        if x is self._read and index == self._first + len(self.joined[self._first]):
            self.joined[self._first].append(outputs)
        else:
            self._read, self._first, self.joined[index] = x, index, [outputs]

    def products(self, index: int, x: Tensor) -> Tensor:
        """x [..., I] times the weights of layer `index`, [..., O]: a part of the products of those it is joined to."""
        if index in self.joined:
            self._first = index
            outputs = self.joined[index]
            flat_1TI = x.reshape(1, -1, x.shape[-1])
            products = graph.linear(flat_1TI, self.weights, index, len(outputs), sum(outputs))
            self._products = products.reshape(*x.shape[:-1], sum(outputs))
        assert self._products is not None
        return self._products.split(self.joined[self._first], dim=-1)[index - self._first]


class _TwinLinear(nn.Module):
    """Stands for the `index`-th linear layer."""

    def __init__(self, inputs: _Inputs, index: int, layer: BlockLinear) -> None:
        super().__init__()
        self.inputs, self.index = inputs, index
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = None if layer.bias is None else nn.Parameter(torch.empty(layer.out_features))

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta:
            self.inputs.note(self.index, x, self.out_features)
            return x.new_empty(*x.shape[:-1], self.out_features)
        out = self.inputs.products(self.index, x)
        return out if self.bias is None else out + self.bias


class _TwinLayer(CacheLayerMixin):
    """Stands for the `index`-th layer of a cache whose attention writes by itself."""

    is_sliding = False

    def __init__(self, inputs: _Inputs, index: int) -> None:
        super().__init__()
        self.inputs, self.index = inputs, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """There is nothing to hold."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The new ones alone, with this layer for attention."""
        key_states.tree_layer = self  # type: ignore[attr-defined]
        return key_states, value_states

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """As `TreeLayer.attend`."""
        return graph.attend(query, key, value, self.inputs.place, self.index, scale)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask is given; the library still asks."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Positions are given."""
        return 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    get_max_cache_shape = get_max_length


class _Forward(nn.Module):
    """The stock forward of a twin, with the final hidden states and what goes into each layer beside the logits."""

    def __init__(self, twin: Any, inputs: _Inputs, mask_kinds: Sequence[str] | None) -> None:
        super().__init__()
        self.twin, self.inputs, self.mask_kinds = twin, inputs, mask_kinds
        names = inspect.signature(twin.forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"
        self.num_layers = twin.config.get_text_config().num_hidden_layers
        self.layer_inputs = LayerInputs(twin)
        self.hidden: Tensor | None = None
        twin.get_output_embeddings().register_forward_pre_hook(self._before_output)

    def forward(self, tokens_1T: Tensor, positions_1T: Tensor, weights: Tensor, place: Tensor) -> tuple[Tensor, ...]:
        self.inputs.weights, self.inputs.place = weights, place
        # a mask that is given isn't made; our attention looks at none
        mask = torch.zeros(1, 1, 1, 1, device=tokens_1T.device)
        with self.layer_inputs.seen(self.layer_inputs.can_be_seen) as found:
            out = self.twin(
                input_ids=tokens_1T,
                attention_mask=mask if self.mask_kinds is None else dict.fromkeys(self.mask_kinds, mask),
                position_ids=positions_1T,
                use_cache=True,
                **{self.cache_name: Cache(layers=[_TwinLayer(self.inputs, index) for index in range(self.num_layers)])},
            )
        assert self.hidden is not None
        return self.hidden, out.logits, *(found[number] for number in self.layer_inputs.can_be_seen)

    def _before_output(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.hidden = inputs[0]


def _twin(model: Any, inputs: _Inputs) -> nn.Module:
    """The same modelling code, on no numbers at all, with linear layers that call ours."""
    with torch.device("meta"):
        twin: nn.Module = type(model)(copy.deepcopy(model.config))
        for index, (name, layer) in enumerate(linear_layers(model)):
            twin.set_submodule(name, _TwinLinear(inputs, index, layer))
    return twin.eval().requires_grad_(False)


def _give_numbers(twin: nn.Module, model: nn.Module) -> None:
    """Weights that are never read, except for those that become a part of the program."""
    twin.to_empty(device="cpu")
    held = small_tensors(model)
    for name, tensor in [*twin.named_parameters(), *twin.named_buffers()]:
        if name in held:
            tensor.copy_(held[name])
