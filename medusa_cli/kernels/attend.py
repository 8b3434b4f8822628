"""Attention of tree nodes on a CPU: one call writes the new keys and values and reads the columns in use.

The library's attention wants the cache's columns sliced, a mask over them, and that mask repeated for folded query
heads, in a dozen operations a layer; for a few nodes these cost more than the arithmetic.
Shape letters: B rows, Q query heads, H key heads, N nodes, C cache columns, E head width.
"""

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from medusa_cli.kernels.native import CannotCompile, library

MOST_NODES = 64  # beyond these, products over all nodes at once are faster


@dataclass(frozen=True)
class Nodes:
    """Where nodes stand: committed tokens of each row (lengths_B), who is above whom, and how deep each is."""

    lengths_B: Tensor
    ancestors_XNN: Tensor
    depths_XN: Tensor


class _Call(ctypes.Structure):
    """`Call` of attend.cpp, member for member."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "key", "value")),
        *((name, ctypes.c_long * 3) for name in ("query_strides", "key_strides", "value_strides")),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_long * 2) for name in ("keys_strides", "values_strides")),
        *((name, ctypes.c_void_p) for name in ("lengths", "ancestors", "depths")),
        ("trees", ctypes.c_long),
        ("window", ctypes.c_long),
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("rows", "query_heads", "key_heads", "nodes", "width", "value_width")),
        ("scale", ctypes.c_float),
        ("threads", ctypes.c_int),
    ]


@functools.cache
def function() -> ctypes.CDLL:
    """attend.cpp, compiled. Raises CannotCompile where there is no compiler."""
    found = library(Path(__file__).with_name("attend.cpp"))
    found.attend.argtypes = [ctypes.POINTER(_Call)]
    found.attend.restype = None
    return found


def can_attend() -> bool:
    """Whether the kernel can be had on this machine."""
    try:
        function()
    except CannotCompile:
        return False
    return True


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    nodes: Nodes,
    window: int | None,
    scale: float,
) -> Tensor:
    """Attention of query [B, Q, N, E] over rows' caches keys, values [B, H, C, E] with new key, value [B, H, N, E].

    Writes the new ones behind each row's committed columns. All in float32 on the CPU; returns [B, N, Q, E].
    """
    query, key, value = (_dense(tensor) for tensor in (query, key, value))
    num_rows, query_heads, num_nodes, width = query.shape
    for tensor in (query, key, value, keys, values):
        # the kernel reads what a pointer points to: another width or order lies past the end
        assert tensor.dtype == torch.float32, tensor.dtype
        assert tensor.stride(-1) == 1
    assert keys.stride(2) == width, "columns of the cache stand behind each other"
    # solvers leave matrices in columns, and the kernel reads rows
    ancestors_XNN, depths_XN = nodes.ancestors_XNN.contiguous(), nodes.depths_XN.contiguous()
    value_width = value.shape[-1]
    out = query.new_empty(num_rows, num_nodes, query_heads, value_width)
    call = _Call(
        query.data_ptr(), key.data_ptr(), value.data_ptr(),
        query.stride()[:3], key.stride()[:3], value.stride()[:3],
        keys.data_ptr(), values.data_ptr(), keys.stride()[:2], values.stride()[:2],
        nodes.lengths_B.data_ptr(), ancestors_XNN.data_ptr(), depths_XN.data_ptr(),
        len(depths_XN), window or 0, out.data_ptr(),
        num_rows, query_heads, key.shape[1], num_nodes, width, value_width, scale, torch.get_num_threads(),
    )  # fmt: skip
    function().attend(ctypes.byref(call))
    return out


def _dense(tensor: Tensor) -> Tensor:
    """With numbers of the last dimension side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
