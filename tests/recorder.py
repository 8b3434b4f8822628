"""What a CUDA graph does, on a CPU: what was recorded runs again over the same memory, and Python is not asked.

Operations are caught below autograd, where each is one call on tensors. Their results stay where they were first
written; a replay writes them anew, in order. What a graph can't hold is refused as CUDA refuses it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from medusa_cli.contracts import Seen
from medusa_cli.model.runners.cuda_graphs import Recorded

ASKS_THE_HOST = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero", "aten::equal"}


@dataclass(frozen=True)
class Operation:
    """One call, and the tensors it made."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: list[Tensor]

    def again(self) -> None:
        """Write the results anew into the memory of the first ones."""
        for old, new in zip(self.made, tensors_in(self.function(*self.args, **self.kwargs)), strict=True):
            if old is not new:
                old.copy_(new)


class Recording(TorchDispatchMode):
    """Runs what it sees, and remembers it."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = function.name().partition(".")[0]
        if name in ASKS_THE_HOST:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        found = function(*args, **(kwargs or {}))
        held = {each.untyped_storage().data_ptr() for each in tensors_in((args, kwargs))}
        made = tensors_in(found)
        changes = any(each.alias_info is not None and each.alias_info.is_write for each in function._schema.arguments)
        # what shows the memory of what it was given changes with it
        if changes or any(each.untyped_storage().data_ptr() not in held for each in made):
            self.operations.append(Operation(function, args, kwargs or {}, made))
        return found


def tensors_in(found: Any) -> list[Tensor]:
    """The tensors among arguments or results."""
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]


def on_cpu(run: Callable[[], Seen]) -> Recorded:
    """A recorder for `GraphedForward`."""
    with Recording() as recording:
        seen = run()

    def replay() -> None:
        for operation in recording.operations:
            operation.again()

    return Recorded(seen, replay)
