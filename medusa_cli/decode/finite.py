"""Non-finite logits: no token can be read off them. Found in the read that a step makes anyway, explained afterwards.

Shape letters: V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from medusa_cli.errors import TargetError
from medusa_cli.kernels.argmax import have_best
from medusa_cli.model.target import Target

_DAMAGED = "the weights are damaged: copy or download the whole model again"


class Text(Protocol):
    """What is said of a row: its prompt's number, and its ids so far."""

    @property
    def key(self) -> int:
        """Index of the prompt."""

    @property
    def tokens(self) -> Sequence[int]:
        """Prompt and new ids, the root included."""


class NotFinite(Exception):
    """The logits that would decide the next token of this row are not finite. No row has taken anything."""

    def __init__(self, row: Text) -> None:
        super().__init__(f"row {row.key}")
        self.row = row

    @classmethod
    def raise_for(cls, rows: Sequence[Text], finite: Sequence[int]) -> None:
        """Raise for the first row that has a 0."""
        for row, is_finite in zip(rows, finite, strict=True):
            if not is_finite:
                raise cls(row)


def error_of(target: Target, found: NotFinite) -> TargetError:
    """What to tell the user: which text, where in it, and the layer that such numbers first came out of."""
    row = found.row
    where = f"the logits of {target.name} are not finite in {target.dtype_name}: text {row.key + 1}, "
    source = _source(target, row.tokens)
    if source is None:
        return TargetError(
            f"{where}after {len(row.tokens)} tokens; read anew, the same text gives finite ones",
            "try --runner eager --attention eager, and please report it with the output of medusa doctor --json",
        )
    token = "" if target.tokenizer is None else f" {target.tokenizer.convert_ids_to_tokens(row.tokens[source.place])!r}"
    smaller = "use --dtype bfloat16 or float32, which hold larger numbers; if that is no help, "
    return TargetError(
        f"{where}after {len(row.tokens)} tokens; {source.layer} is the first to give such numbers, at token "
        f"{source.place} (id {row.tokens[source.place]}{token})",
        (smaller if target.dtype == torch.float16 else "") + _DAMAGED,
    )


@dataclass(frozen=True)
class _Source:
    """The first module whose output is not finite, and the place in the text that it is at."""

    layer: str
    place: int


@torch.inference_mode()
def _source(target: Target, tokens: Sequence[int]) -> _Source | None:
    """Read the text once more and look at what every layer gives; None when all of it is finite."""
    with _looked_at(target.model, len(tokens)) as found:
        logits_11V = target.prefill([tokens], target.new_cache(1, len(tokens))).logits_BNV
    if not found and not bool(have_best(logits_11V).all()):
        return _Source("the output", len(tokens) - 1)
    return found[0] if found else None


@contextmanager
def _looked_at(model: Any, num_tokens: int) -> Iterator[list[_Source]]:
    """What is not finite, in the order in which layers without layers of their own give it."""
    found: list[_Source] = []

    def look(name: str, output: Any) -> None:
        if not isinstance(output, Tensor) or not output.is_floating_point() or found:
            return
        bad = ~output.isfinite()
        if bool(bad.any()):
            # what has no place for each token (a rope table, narrowed logits) is laid at the last one
            by_token = output.dim() == 3 and output.shape[1] == num_tokens
            found.append(_Source(name, int(bad.any(-1).any(0).int().argmax()) if by_token else num_tokens - 1))

    leaves = [(name, module) for name, module in model.named_modules() if not any(True for _ in module.children())]
    handles = [
        module.register_forward_hook(lambda module, args, output, name=name: look(name, output))
        for name, module in leaves
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
