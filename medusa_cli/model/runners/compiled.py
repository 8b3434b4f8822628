"""The forward over a few nodes as one compiled program: built once for an architecture and a machine, kept on disk.

torch's ahead-of-time compiler fuses the graph of runners/export.py around calls of kernels/graph.cpp. The program
holds no weights, so models that differ in these alone share it.
Shape letters: B rows, N tree nodes, T = B * N nodes of all rows, H hidden, V vocabulary.
"""

import copy
import hashlib
import inspect
import logging
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from medusa_cli.contracts import Seen
from medusa_cli.kernels import graph
from medusa_cli.kernels.attend import MOST_NODES
from medusa_cli.kernels.blocks import FEW_ROWS
from medusa_cli.kernels.native import CannotCompile, code_home, compiler, fingerprint
from medusa_cli.kernels.packed import PackedLinear
from medusa_cli.model.forwards import HoldsNothing, Work
from medusa_cli.model.runners import export
from medusa_cli.model.runners.export import MOST_TOKENS, linear_layers, small_tensors
from medusa_cli.model.runners.stock import StockForward
from medusa_cli.model.taps import stacked
from medusa_cli.util import sealed
from medusa_cli.util.paths import say_once, why_not_private

PROGRAM, CONSTANTS = "forward.pt2", "constants.pt"
FOR_TORCH = ("g++", "clang++", "c++")  # torch tells compilers apart by their names

logger = logging.getLogger(__name__)


class CompiledForward(HoldsNothing):
    """A model's forward over up to MOST_TOKENS nodes. Reads the live model's weights and writes its cache.

    stock   of a target whose attention runs in the compiled kernel
    """

    def __init__(self, stock: StockForward, folder: Path) -> None:
        graph.load()
        model = stock.model
        # torch's own function for this first compiles, and runs, a test of the processor in a folder that everybody can
        # make before: which instructions there are is a part of the program's name
        loader = torch._C._aoti.AOTIModelPackageLoader(str(folder / PROGRAM), "model", False, 1, -1)
        held = torch.load(folder / CONSTANTS)
        names = loader.get_constant_fqns()
        constants = {name: held[name] if name in held else _attribute(model, name) for name in names}
        inactive, check_full_update, user_managed = False, True, True
        loader.load_constants(constants, inactive, check_full_update, user_managed)
        self._constants = constants  # the program reads them where they lie
        self.program: Callable[[list[Tensor]], list[Tensor]] = loader.boxed_run
        self._in_integers = any(layer.blocks.in_integers for _, layer in linear_layers(model))
        self.layers = [layer for _, layer in linear_layers(model)]
        self.weights = graph.weights_table(self.layers)
        self._stock = stock

    def takes(self, work: Work) -> bool:
        """All of few nodes."""
        # in integers nothing else may: the text would hang on who ran a step
        most = MOST_TOKENS if self._in_integers else FEW_ROWS
        few = work.tokens_BN.numel() <= most and (self._in_integers or work.tree.num_nodes <= MOST_NODES)
        return few and work.is_plain_step

    def __call__(self, work: Work) -> Seen:
        """Score all nodes."""
        num_rows, num_nodes = work.tokens_BN.shape
        place = work.cache.place(work.rows, num_nodes, work.tokens_BN.device, work.tree)
        assert place.nodes is not None
        table = graph.place_table(place.nodes, work.cache.stores(place))
        # the program reads as many numbers as there are, side by side, and looks at no strides
        tokens_1T = work.tokens_BN.reshape(1, -1).contiguous()
        positions_BN = self._stock.positions(work.tree, place)
        positions_1T = positions_BN.expand(num_rows, -1).reshape(1, -1).contiguous()
        out = self.program([tokens_1T, positions_1T, self.weights, table])
        hidden_BNH, logits_BNV, *inner = (each.view(num_rows, num_nodes, -1) for each in out)
        return Seen(hidden_BNH, logits_BNV, stacked(dict(enumerate(inner)), work.taps, hidden_BNH, hidden_BNH.device))


def folder_of(model: Any) -> Path:
    """Where the program for models like this one is kept on this machine. Raises CannotCompile where none can be."""
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
    return code_home() / "forwards" / hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def build(model: Any, mask_kinds: Sequence[str] | None) -> Path:
    """Compile the forward, unless an earlier run did; a minute or two. Returns its folder.

    mask_kinds   kinds of layers when the model picks its masks out of a mapping, else None

    Raises CannotCompile without a compiler, CannotExport for models that can't be turned into a graph.
    """
    graph.load()
    folder = folder_of(model)
    fault = sealed.fault_in(folder)
    if fault is None:
        return folder
    if folder.exists():
        say_once(f"compiled anew, since {fault}")
    logger.info("compiling the model's forward for this machine, once: a minute or two")
    sealed.make(folder, lambda made: _compile(model, mask_kinds, made))
    if (fault := sealed.fault_in(folder)) is not None:
        raise CannotCompile(fault)
    return folder


def is_built(folder: Path) -> bool:
    """Whether an earlier run compiled it, and it is as it was. What isn't is told."""
    fault = sealed.fault_in(folder)
    if fault is not None and folder.exists():
        say_once(f"steps are slower than they could be: {fault}; --runner compiled makes it anew")
    return fault is None


def _compile(model: Any, mask_kinds: Sequence[str] | None, made: Path) -> None:
    """Write the program and what it holds."""
    with _torch_in_private(made.parent) as command:
        exported = export.export(model, mask_kinds)
        torch._inductor.aoti_compile_and_package(
            exported,
            package_path=str(made / PROGRAM),
            inductor_configs={
                "aot_inductor.custom_ops_to_c_shims": graph.c_functions(),
                "aot_inductor.package_constants_in_so": False,
                # torch keeps these under a name that everybody can guess and make first, and reads what it finds there
                "aot_inductor.precompile_headers": False,
                "cpp_cache_precompile_headers": False,
                "cpp.cxx": (command,),
                "cpp.threads": torch.get_num_threads(),
            },
        )
    parameters = set(exported.graph_signature.inputs_to_parameters.values())
    buffers = set(exported.graph_signature.inputs_to_buffers.values())
    held = {name: value for name, value in exported.constants.items() if name not in parameters | buffers}
    torch.save(held, made / CONSTANTS)


@contextmanager
def _torch_in_private(folder: Path) -> Iterator[str]:
    """A folder of torch's compiler's own within this one, for as long as it works; gives the compiler to call.

    Of itself torch takes a folder in the system's temporary one that anybody could have made before, and runs what it
    finds in it. Raises CannotCompile without a compiler.
    """
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

    # torch quotes no path: one with a space needs another place, of a name that nobody can guess
    within = folder if _is_one_word(str(folder)) else None
    with TemporaryDirectory(dir=within) as work, temporary_cache_dir(work):
        if fault := why_not_private(Path(work)):
            raise CannotCompile(fault)
        yield _as_one_word(compiler(FOR_TORCH), Path(work))


def _is_one_word(text: str) -> bool:
    """Whether a shell takes it as it is."""
    return shlex.quote(text) == text


def _as_one_word(command: Sequence[str], folder: Path) -> str:
    """The compiler's path, or that of a program which calls it with its options: torch takes no more than one word."""
    if len(command) == 1 and _is_one_word(command[0]):
        return command[0]
    name = next(word for word in reversed(command) if shutil.which(word))
    calls = folder / Path(name).name
    calls.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n', encoding="utf-8")
    calls.chmod(0o700)
    return str(calls)


def _attribute(model: nn.Module, name: str) -> Tensor:
    """What the live model holds where the twin holds `name`."""
    path, _, last = name.removeprefix("twin.").rpartition(".")
    module = model.get_submodule(path)
    if isinstance(module, PackedLinear) and last == "weight":
        return module.dense()
    found: Tensor = getattr(module, last)
    return found.detach()
