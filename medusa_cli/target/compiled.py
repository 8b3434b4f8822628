"""The forward over a few nodes as one compiled program: built once for an architecture and a machine, kept on disk.

torch's ahead-of-time compiler fuses the graph of target/export.py around calls of kernels/graph.cpp. The program holds
no weights, so models that differ in these alone share it.
Shape letters: B rows, N tree nodes, T = B * N nodes of all rows, H hidden, V vocabulary.
"""

import copy
import hashlib
import inspect
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from medusa_cli.contracts import Seen
from medusa_cli.home import cache_home
from medusa_cli.kernels import graph
from medusa_cli.kernels.attend import Nodes
from medusa_cli.kernels.native import fingerprint
from medusa_cli.kernels.packed import PackedLinear
from medusa_cli.target import export
from medusa_cli.target.export import linear_layers, small_tensors

logger = logging.getLogger(__name__)


class CompiledForward:
    """A model's forward over up to MOST_TOKENS nodes. Reads the live model's weights and writes its cache."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        graph.load()
        self.program = torch._inductor.aoti_load_package(str(folder / "forward.pt2"))
        held = torch.load(folder / "constants.pt")
        names = self.program.get_constant_fqns()
        constants = {name: held[name] if name in held else _attribute(model, name) for name in names}
        self.program.load_constants(constants, check_full_update=True, user_managed=True)
        self._constants = constants  # the program reads them where they lie
        self.layers = [layer for _, layer in linear_layers(model)]
        self.weights = graph.weights_table(self.layers)

    def __call__(
        self,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        nodes: Nodes,
        stores: Sequence[tuple[Tensor, Tensor, int | None]],
    ) -> Seen:
        """Score all nodes; `stores` are keys and values of the placed rows and the window, layer by layer."""
        num_rows, num_nodes = tokens_BN.shape
        place = graph.place_table(nodes, stores)
        # the program reads as many numbers as there are, side by side, and looks at no strides
        tokens_1T = tokens_BN.reshape(1, -1).contiguous()
        positions_1T = positions_BN.expand(num_rows, -1).reshape(1, -1).contiguous()
        hidden_1TH, logits_1TV = self.program(tokens_1T, positions_1T, self.weights, place)
        return Seen(hidden_1TH.view(num_rows, num_nodes, -1), logits_1TV.view(num_rows, num_nodes, -1))


def folder_of(model: Any) -> Path:
    """Where the program for models like this one is kept on this machine. Raises CannotCompile without a compiler."""
    config = copy.deepcopy(model.config)
    config._name_or_path = ""
    parts = (
        type(model).__name__,
        inspect.getsource(inspect.getmodule(type(model))),  # type: ignore[arg-type]
        config.to_json_string(use_diff=False),
        *(f"{name} {tensor.tolist()}" for name, tensor in small_tensors(model).items()),
        torch.__version__,
        transformers.__version__,
        str(torch.get_num_threads()),
        *(Path(module).read_text(encoding="utf-8") for module in (__file__, export.__file__)),
        fingerprint(graph.SOURCE),
    )
    return cache_home() / "forwards" / hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def build(model: Any, mask_kinds: Sequence[str] | None) -> Path:
    """Compile the forward, unless an earlier run did; a minute or two. Returns its folder.

    mask_kinds   kinds of layers when the model picks its masks out of a mapping, else None

    Raises CannotCompile without a compiler, CannotExport for models that can't be turned into a graph.
    """
    graph.load()
    folder = folder_of(model)
    if is_built(folder):
        return folder
    logger.info("compiling the model's forward for this machine, once: a minute or two")
    exported = export.export(model, mask_kinds)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.") as scratch:
        made = Path(scratch) / "forward"
        made.mkdir()
        torch._inductor.aoti_compile_and_package(
            exported,
            package_path=str(made / "forward.pt2"),
            inductor_configs={
                "aot_inductor.custom_ops_to_c_shims": graph.c_functions(),
                "aot_inductor.package_constants_in_so": False,
                "cpp.threads": torch.get_num_threads(),
            },
        )
        parameters = set(exported.graph_signature.inputs_to_parameters.values())
        buffers = set(exported.graph_signature.inputs_to_buffers.values())
        held = {name: value for name, value in exported.constants.items() if name not in parameters | buffers}
        torch.save(held, made / "constants.pt")
        if not folder.exists():
            made.rename(folder)
    return folder


def is_built(folder: Path) -> bool:
    """Whether an earlier run compiled it."""
    return (folder / "constants.pt").is_file()


def _attribute(model: nn.Module, name: str) -> Tensor:
    """What the live model holds where the twin holds `name`."""
    path, _, last = name.removeprefix("twin.").rpartition(".")
    module = model.get_submodule(path)
    if isinstance(module, PackedLinear) and last == "weight":
        return module.dense()
    found: Tensor = getattr(module, last)
    return found.detach()
