"""Layouts: how other tools name the tensors of Medusa heads. A format is known by these names alone.

fasterdecoding  {head}.{layer}.linear.weight|bias, {head}.{L}.weight        FasterDecoding, TGI, TensorRT-LLM
medusa2         the same after `medusa_head.`, beside the model's own        FasterDecoding's Medusa-2
modelopt        the same after `medusa_heads.`, alone or beside the model's  TensorRT Model Optimizer
vllm            blocks.{head}.layers.{layer}.weight|bias, lm_heads.{head}.weight or one lm_head.weight, token_map

The last linear layer of a head is its output; where there is none, the heads share the target's.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from medusa_cli.errors import FormatError

_INDEX = r"(0|[1-9][0-9]{0,3})"
_OURS = {
    "fasterdecoding": (rf"{_INDEX}\.{_INDEX}\.linear\.(weight|bias)", rf"{_INDEX}\.{_INDEX}\.weight"),
    "vllm": (rf"blocks\.{_INDEX}\.layers\.{_INDEX}\.(weight|bias)", rf"lm_heads\.{_INDEX}()\.weight"),
}


@dataclass(frozen=True)
class Layout:
    """One way of naming.

    blocks, outputs   patterns of names: head, layer and part; head and layer
    prefix            what stands before all of them
    beside_model      other tensors may be there: the model's
    """

    name: str
    blocks: str
    outputs: str
    prefix: str = ""
    beside_model: bool = False

    def stripped(self, name: str) -> str | None:
        """The name without the prefix; None for one that lacks it."""
        return name.removeprefix(self.prefix) if name.startswith(self.prefix) else None

    def fits(self, names: Iterable[str]) -> bool:
        """Whether a block of a head is among these names."""
        return any(re.fullmatch(self.blocks, bare) for name in names if (bare := self.stripped(name)) is not None)


LAYOUTS: tuple[Layout, ...] = (
    Layout("medusa2", *_OURS["fasterdecoding"], prefix="medusa_head.", beside_model=True),
    Layout("modelopt", *_OURS["fasterdecoding"], prefix="medusa_heads.", beside_model=True),
    Layout("vllm", *_OURS["vllm"]),
    # the prefix that vLLM takes off
    Layout("vllm", *_OURS["vllm"], prefix="medusa_heads."),
    Layout("fasterdecoding", *_OURS["fasterdecoding"]),
)


@dataclass
class Parts:
    """Names of the heads' tensors by their place.

    outputs    name of each head's output, by head
    shared     name of one output for all heads; token_map: of the ids that its rows stand for
    """

    weights: dict[tuple[int, int], str] = field(default_factory=dict)
    biases: dict[tuple[int, int], str] = field(default_factory=dict)
    outputs: dict[int, str] = field(default_factory=dict)
    shared: str | None = None
    token_map: str | None = None

    @property
    def num_heads(self) -> int:
        """K, counted."""
        return 1 + max(head for head, _ in self.weights)

    @property
    def num_layers(self) -> int:
        """L, counted."""
        return 1 + max(layer for _, layer in self.weights)


def layouts_of(names: Iterable[str]) -> list[Layout]:
    """The layouts that these names are of."""
    held = list(names)
    return [layout for layout in LAYOUTS if layout.fits(held)]


def parts_of(layout: Layout, shapes: Mapping[str, tuple[int, ...]], where: str) -> Parts:
    """Names by place. Raises FormatError, naming the tensor, for one that is missing or belongs nowhere.

    where   the files, for messages
    """
    parts, depths = Parts(), dict[int, int]()
    for name in sorted(shapes):
        bare = layout.stripped(name)
        if bare is None or not _sort_in(layout, bare, name, parts, depths):
            if bare is None and layout.beside_model:
                continue
            raise FormatError(
                f"{where}: {name[:100]} belongs to no head that this program can read",
                "heads are residual blocks and an output; another kind, or weights in 8 bits, must be converted before",
            )
    _check_complete(parts, depths, where)
    return parts


def _sort_in(layout: Layout, bare: str, name: str, parts: Parts, depths: dict[int, int]) -> bool:
    """Put one name in its place; False where it has none. `depths`: the layer number in each output's name."""
    if found := re.fullmatch(layout.blocks, bare):
        place = int(found[1]), int(found[2])
        (parts.weights if found[3] == "weight" else parts.biases)[place] = name
        return True
    if found := re.fullmatch(layout.outputs, bare):
        parts.outputs[int(found[1])] = name
        if found[2]:
            depths[int(found[1])] = int(found[2])
        return True
    if layout.name == "vllm" and bare in ("lm_head.weight", "token_map"):
        if bare == "token_map":
            parts.token_map = name
        else:
            parts.shared = name
        return True
    return False


def _check_complete(parts: Parts, depths: Mapping[int, int], where: str) -> None:
    """Every head has the same layers, all or none a bias, all or none an output behind the last layer."""

    def lacks(what: str) -> FormatError:
        return FormatError(f"{where}: {what}", "copy the whole folder again from where the heads come from")

    num_heads, num_layers = parts.num_heads, parts.num_layers
    if num_heads * num_layers > len(parts.weights):
        wanted = ((head, layer) for head in range(num_heads) for layer in range(num_layers))
        head, layer = next(place for place in wanted if place not in parts.weights)
        raise lacks(f"head {head} lacks the weight of block {layer}, and others have it")
    if parts.biases and parts.biases.keys() != parts.weights.keys():
        head, layer = min(parts.weights.keys() ^ parts.biases.keys())
        raise lacks(f"the bias of head {head}, block {layer} has no weight, or is missing where others have one")
    if set(parts.outputs) == {0} and num_heads > 1 and not depths and parts.shared is None:
        parts.shared = parts.outputs.pop(0)  # one output for all, as vLLM also takes it
    if parts.outputs and parts.shared:
        raise lacks("there are outputs of single heads, and one for all")
    if parts.outputs and set(parts.outputs) != set(range(num_heads)):
        head = min(set(parts.outputs) ^ set(range(num_heads)))
        raise lacks(f"head {head} has no output, and others have one; or it has no blocks")
    if any(depth != num_layers for depth in depths.values()):
        raise lacks(f"an output stands at place {next(iter(depths.values()))}, and blocks end at {num_layers}")
    if parts.token_map and parts.outputs:
        raise lacks("there is a token_map, and each head has an output of its own")
