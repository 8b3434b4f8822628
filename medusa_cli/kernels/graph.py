"""What a compiled graph calls for its linear layers and its attention, and the tables of addresses it is given.

torch's ahead-of-time compiler turns calls of these operators into direct calls of C functions (graph.cpp). Weights,
cache and tree reach them as int64 tensors of addresses, so a graph holds no weights and serves every model of its
shape.
"""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from medusa_cli.kernels.attend import Nodes
from medusa_cli.kernels.blocks import BlockLinear
from medusa_cli.kernels.native import library

SOURCE, NAMES = (Path(__file__).with_name(name) for name in ("graph.cpp", "graph_names.cpp"))
CALLED = ("aoti_torch_cpu_medusa_linear", "aoti_torch_cpu_medusa_attend")
WEIGHTS_NUMBERS, PLACE_NUMBERS, LAYER_NUMBERS = 4, 6, 7  # of `Weights`, `Place` and `Layer` in graph.cpp
ERROR, HANDLE = "AOTITorchError", "AtenTensorHandle"


@functools.cache
def load() -> None:
    """Compile graph.cpp, make its functions known to graphs, and define the operators. Raises CannotCompile."""
    torch_home = Path(torch.__file__).parent
    flags = (f"-I{torch_home / 'include'}", f"-L{torch_home / 'lib'}", "-ltorch_cpu")
    functions, names = library(SOURCE, flags), library(NAMES, mode=ctypes.RTLD_GLOBAL)
    addresses = (ctypes.cast(functions[name], ctypes.c_void_p) for name in CALLED)
    names.set_functions(*addresses)
    _operators()


@functools.cache
def _operators() -> torch.library.Library:
    """The operators as the exporter sees them: shapes alone."""
    made = torch.library.Library("medusa", "FRAGMENT")
    made.define("medusa_linear(Tensor x, Tensor weights, int first, int count, int outputs, int threads) -> Tensor")
    made.define("medusa_attend(Tensor query, Tensor key, Tensor value, Tensor place, int layer, float scale) -> Tensor")

    @torch.library.register_fake("medusa::medusa_linear", lib=made)
    def _(x: Tensor, weights: Tensor, first: int, count: int, outputs: int, threads: int) -> Tensor:
        return x.new_empty(1, x.shape[1], outputs)

    @torch.library.register_fake("medusa::medusa_attend", lib=made)
    def _(query: Tensor, key: Tensor, value: Tensor, place: Tensor, layer: int, scale: float) -> Tensor:
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])

    return made


def linear(x_1TI: Tensor, weights: Tensor, first: int, count: int, outputs: int) -> Tensor:
    """[1, T, I] to [1, T, outputs]: the products with `count` weights from row `first` of the table on."""
    threads = torch.get_num_threads()
    made: Tensor = torch.ops.medusa.medusa_linear(x_1TI.contiguous(), weights, first, count, outputs, threads)
    return made


def attend(query: Tensor, key: Tensor, value: Tensor, place: Tensor, layer: int, scale: float) -> Tensor:
    """Attention of query [1, Q, T, E], key, value [1, H, T, E] and the layer's cache: [1, T, Q, F]."""
    made: Tensor = torch.ops.medusa.medusa_attend(query, key, value, place, layer, scale)
    return made


def c_functions() -> dict[object, list[str]]:
    """The C declaration of each operator, for the compiler."""
    load()
    tensors, numbers = f"{HANDLE} x, {HANDLE} weights", "int64_t first, int64_t count, int64_t outputs, int64_t threads"
    attended = ", ".join(f"{HANDLE} {name}" for name in ("query", "key", "value", "place"))
    return {
        torch.ops.medusa.medusa_linear.default: [
            f"{ERROR} aoti_torch_cpu_medusa_linear({tensors}, {numbers}, {HANDLE}* made)"
        ],
        torch.ops.medusa.medusa_attend.default: [
            f"{ERROR} aoti_torch_cpu_medusa_attend({attended}, int64_t layer, double scale, {HANDLE}* made)"
        ],
    }


def weights_table(layers: Sequence[BlockLinear]) -> Tensor:
    """Where the weights of these layers lie, a row each: `Weights` of graph.cpp."""
    return torch.tensor(
        [[one.blocks.code, one.blocks.stored.data_ptr(), one.in_features, one.out_features] for one in layers]
    )


def place_table(nodes: Nodes, stores: Sequence[tuple[Tensor, Tensor, int | None]]) -> Tensor:
    """Where nodes and the layers' caches lie: `Place` of graph.cpp.

    stores   keys and values [B, H, C, E] of the placed rows and the window of each layer
    """
    head = [
        len(nodes.lengths_B),
        nodes.lengths_B.data_ptr(),
        nodes.ancestors_XNN.data_ptr(),
        nodes.depths_XN.data_ptr(),
        len(nodes.depths_XN),
        torch.get_num_threads(),
    ]
    for keys, values, window in stores:
        head += [keys.data_ptr(), values.data_ptr(), *keys.stride()[:2], *values.stride()[:2], window or 0]
    return torch.tensor(head)
