"""Runners: how the linear layers lie, and whether a forward of its own stands before the stock one.

blocks is packed where a step's few rows read the weights in 4, 8 or 16 bits, for models whose weights can be stored so.
compiled has layers that read their weights in place, whatever these are, under one program (runners/compiled.py).
graphs leaves layers as they are and replays what a GPU recorded (runners/cuda_graphs.py).
"""

import ctypes
import logging
import platform
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from medusa_cli.errors import TargetError
from medusa_cli.kernels.blocks import BlockLinear, Blocks, functions
from medusa_cli.kernels.blocks import in_integers as integers
from medusa_cli.kernels.layout import packed_linear
from medusa_cli.kernels.native import CannotCompile
from medusa_cli.kernels.packed import PackedLinear
from medusa_cli.model.runners.kept_blocks import keep, recall
from medusa_cli.util.paths import say_once


@dataclass(frozen=True)
class Runner:
    """A layout of the linear layers, and maybe a forward over a few nodes.

    packs      layers are laid out for the CPU's kernels; else they stay as the library made them, wherever these are
    few_bits   weights are read in the bits that they were stored in, where they lie on a grid
    in_place   the other weights are read where they lie
    without    the runner that is left when its forward is left out; None: it has no forward of its own
    """

    packs: bool = False
    few_bits: bool = False
    in_place: bool = False
    without: str | None = None


RUNNERS = {
    "eager": Runner(),
    "packed": Runner(packs=True),
    "blocks": Runner(packs=True, few_bits=True),
    "compiled": Runner(packs=True, few_bits=True, in_place=True, without="blocks"),
    "graphs": Runner(without="eager"),
}

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _LARGEST = -1, -3, 2**31 - 1


def keep_freed_memory() -> None:
    """Let glibc reuse the memory of large tensors instead of handing it back to the system.

    A forward frees and takes the same megabytes hundreds of times; each time the system would clear the pages again,
    which cost half of the time of a forward over many rows. Other C libraries are left as they are.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        libc.mallopt(_M_TRIM_THRESHOLD, _LARGEST)


def give_back_freed_memory() -> None:
    """Hand the system what a large forward left free, once for all of its layers.

    Blocks of the next forward have other sizes and seldom fit into those holes: a heap that keeps them grows with every
    prompt. Only the pages that are touched again are cleared again.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def lay_out(model: nn.Module, wanted: str, files: str | None = None, *, in_integers: bool = False) -> str:
    """Give the model, in place, the linear layers of the runner asked for; says which runner it became.

    `auto` is what is quickest as far as is known (runners/autotune.py finds out): blocks where a compiler is there and
    weights lie on a grid, else packed. Raises TargetError when blocks were asked for by name and can't be had.

    files         what tells the files that its weights are in, unchanged: what is found in them is kept for the next
    in_integers   the layers multiply in integers. Raises TargetError where they can't, or where there are others
    """
    runner = RUNNERS.get(wanted, RUNNERS["blocks"])
    if not runner.packs:
        return wanted
    reason = why_no_blocks() if runner.few_bits else None
    if reason is not None and (runner.in_place or in_integers):
        what, other = ("dtype int8", "--dtype float32") if in_integers else (f"the {wanted} runner", "--runner packed")
        raise TargetError(f"{what} can't run: {reason}", f"install a C++ compiler, or {other}")
    blocks = runner.few_bits and reason is None
    kept = recall(files) if files and blocks else {}
    pack(model, blocks=blocks, plain=runner.in_place, kept=kept)
    if files and blocks and not kept:
        keep(model, files)
    if in_integers:
        turn_into_integers(model)
        return "blocks" if wanted == "auto" else wanted
    if runner.in_place or not runner.few_bits:
        return wanted
    if any(isinstance(module, BlockLinear) for module in model.modules()):
        return "blocks"
    if wanted == "blocks":
        raise TargetError(
            f"the blocks runner can't run: {reason or 'no weights of this model fit 4, 8 or 16 bits'}",
            "use --runner packed; models in bfloat16 and GGUF files in Q4_0, Q4_1 or Q8_0 have such weights",
        )
    return "packed"


def turn_into_integers(model: nn.Module) -> None:
    """Let all packed layers multiply in integers, in place; weights on no grid of 4 or 8 bits are rounded to 8.

    Raises TargetError for a model that multiplies with weights elsewhere: such products sum in another order beside
    other rows, and a text would hang on its company.
    """
    others = [name for name, module in model.named_modules() if _multiplies_otherwise(module)]
    if others:
        raise TargetError(
            f"dtype int8 can't run this model: {', '.join(others[:3])} and {len(others) - 1} more are no linear layers",
            "use --dtype float32",
        )
    rounded = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PackedLinear):
                made = integers(child)
                rounded += made.blocks.bits == 8 and not (isinstance(child, BlockLinear) and child.blocks.bits == 8)
                setattr(parent, name, made)
    if rounded:
        say_once(
            f"dtype int8: the weights of {rounded} layers are rounded to 8 bits, for they lie on no grid of 4 or 8",
            logging.INFO,
        )


def _multiplies_otherwise(module: nn.Module) -> bool:
    """Whether it holds a matrix of its own, and isn't a layer of ours or a table of embeddings."""
    matrices = [one for one in module.parameters(recurse=False) if one.dim() > 1]
    return bool(matrices) and not isinstance(module, PackedLinear | nn.Embedding)


def why_no_blocks() -> str | None:
    """What keeps the compiled functions away, in words; None when they are there."""
    try:
        functions()
    except CannotCompile as error:
        say_once(f"steps are slower than they could be, without compiled kernels: {error}", logging.DEBUG)
        return str(error)
    return None


def pack(model: nn.Module, *, blocks: bool, plain: bool = False, kept: Mapping[str, Blocks] | None = None) -> None:
    """Replace the model's linear layers by packed ones, in place; embeddings keep their own weight.

    blocks   weights that can be stored in fewer bits become blocks. Raises CannotCompile where these can't be had
    plain    the other weights are read where they lie
    kept     the blocks of some layers, by name
    """
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                known = (kept or {}).get(f"{path}.{name}".lstrip("."))
                packed = packed_linear(child.weight, child.bias, blocks=blocks, plain=plain, known=known)
                packed.tied_to = child.weight if child.weight in embeddings else None
                setattr(parent, name, packed)
