"""Which runner `auto` takes: the quickest here, by measuring. Remembered for these weights, this machine, its threads.

Layouts of the linear layers are held against each other over some layers of every shape, before the model is laid out;
whole forwards (compiled, recorded) against the same target without them.
"""

import hashlib
import json
import logging
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import medusa_cli
from medusa_cli.atomic import write_atomically
from medusa_cli.contracts import Draft
from medusa_cli.home import cache_home
from medusa_cli.kernels.blocks import find_blocks
from medusa_cli.kernels.layout import packed_linear
from medusa_cli.kernels.packed import PackedLinear
from medusa_cli.target.clock import now
from medusa_cli.target.costs import machine_of
from medusa_cli.target.model import Target
from medusa_cli.target.weights import num_weights
from medusa_cli.trees.tree import TokenTree
from medusa_cli.util.trusted import read_private

LEAST_NUMBERS = 2**22  # a clock can't tell the layouts of a smaller model apart: it gets the first
AHEAD = 1.1  # what comes later in the order is taken when it is this much quicker: less may be noise
ROWS = (1, 8)  # a plain step, and one with guesses
OUT_OF_CACHE = 2**26  # bytes of float weights read in turns: a step finds none of its weights in a cache either
ROUNDS = 5

logger = logging.getLogger(__name__)


def quickest_layout(model: nn.Module, fingerprint: str, *, blocks: bool) -> str:
    """blocks, packed or eager: in which the linear layers of a step take the least time. auto: too small to tell.

    blocks   whether these can be had on this machine
    """
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    if sum(layer.weight.numel() for layer in layers) < LEAST_NUMBERS:
        return "auto"
    key = _key("layout", fingerprint, str(blocks), torch.device("cpu"))
    return chosen(_remembered(key, lambda: layout_seconds(layers, blocks=blocks)))


def is_quicker(target: Target, name: str, attach: Callable[[bool], None]) -> bool:
    """Whether steps with a forward of another kind are no slower than those without.

    attach   puts it in (True) or takes it out; afterwards it is in
    """
    if num_weights(target) < LEAST_NUMBERS:
        return True
    how = f"{target.identity.runner} {target.dtype_name} {target.identity.attention}"
    key = _key(name, target.fingerprint, how, target.device)

    def measure() -> dict[str, float]:
        seconds = {}
        for what, on in ((name, True), (f"without {name}", False)):
            attach(on)
            seconds[what] = step_seconds(target)
        attach(True)
        return seconds

    return chosen(_remembered(key, measure)) == name


def chosen(seconds: Mapping[str, float]) -> str:
    """The first, unless another is clearly quicker."""
    first, best = next(iter(seconds)), min(seconds, key=lambda name: seconds[name])
    return best if seconds[first] > AHEAD * seconds[best] else first


@torch.inference_mode()
def layout_seconds(layers: Sequence[nn.Linear], *, blocks: bool) -> dict[str, float]:
    """Seconds that all these layers take in a plain step and in one over 8 nodes, by layout; the favourite first.

    blocks   whether these can be had; they are tried where weights lie on a grid
    """
    by_shape = defaultdict(list)
    for layer in layers:
        by_shape[layer.weight.shape].append(layer)
    samples = [_Sample.of(alike) for alike in by_shape.values()]
    layouts: dict[str, Callable[[nn.Linear], nn.Module]] = {}
    if blocks and any(sample.lies_on_a_grid() for sample in samples):
        layouts["blocks"] = lambda layer: packed_linear(layer.weight, layer.bias, blocks=True)
    layouts["packed"] = lambda layer: PackedLinear(layer.weight, layer.bias)
    layouts["eager"] = lambda layer: layer
    return {name: sum(sample.seconds(lay) for sample in samples) for name, lay in layouts.items()}


@dataclass(frozen=True)
class _Sample:
    """Some layers of one shape, of as many as there are of it."""

    layers: Sequence[nn.Linear]
    out_of: int

    @classmethod
    def of(cls, alike: Sequence[nn.Linear]) -> "_Sample":
        """As many as don't fit into a cache together."""
        enough = math.ceil(OUT_OF_CACHE / (4 * alike[0].weight.numel()))
        return cls(alike[:enough], len(alike))

    def lies_on_a_grid(self) -> bool:
        """Whether the weights of any can be stored as blocks."""
        return any(find_blocks(layer.weight) is not None for layer in self.layers)

    def seconds(self, lay: Callable[[nn.Linear], nn.Module]) -> float:
        """That all of this shape take, laid out so."""
        laid_out = [lay(layer) for layer in self.layers]
        width = self.layers[0].in_features
        # none are drawn: what others draw later must not depend on whether this was remembered
        return self.out_of * sum(_seconds_each(laid_out, torch.ones(rows, width)) for rows in ROWS)


def _seconds_each(layers: Sequence[nn.Module], inputs: Tensor) -> float:
    """Of one of these layers, at the median over rounds through all of them."""
    times = []
    for _ in range(ROUNDS + 1):
        begun = now(inputs.device)
        for layer in layers:
            layer(inputs)
        times.append(now(inputs.device) - begun)
    return statistics.median(times[1:]) / len(layers)


@torch.inference_mode()
def step_seconds(target: Target) -> float:
    """Of a plain step, and of one over 8 nodes, together: medians after one to warm up."""
    cache = target.new_cache(1, 0)
    target.prefill([[0]], cache)
    total = 0.0
    for rows in ROWS:
        draft = Draft(torch.zeros(1, rows, dtype=torch.long, device=target.device), TokenTree.chain(rows - 1))
        times = []
        for _ in range(ROUNDS + 1):
            begun = now(target.device)
            target.verify(draft, cache)
            times.append(now(target.device) - begun)
        total += statistics.median(times[1:])
    return total


def _key(what: str, fingerprint: str, how: str, device: torch.device) -> dict[str, str]:
    """All that the outcome depends on."""
    return {
        "what": what,
        "fingerprint": fingerprint,
        "how": how,
        "medusa": medusa_cli.__version__,
        "torch": torch.__version__,
        "machine": machine_of(device),
        "threads": str(torch.get_num_threads()),
    }


def _remembered(key: Mapping[str, str], measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Seconds by name: those of an earlier run, else measured now and kept. In the order of `measure`."""
    text = json.dumps(key)
    file = cache_home() / "runners" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
    seconds = _read(file)
    said = logging.INFO if seconds is None else logging.DEBUG  # once, and to whoever asks for more
    if seconds is None:
        seconds = measure()
        with suppress(OSError):  # a home that can't be written to costs the same moment again
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, json.dumps({"of": key, "seconds": seconds}))
    times = ", ".join(f"{name} {1000 * took:.1f} ms" for name, took in seconds.items())
    logger.log(said, "measured for runner auto, steps over 1 and over 8 nodes together: %s", times)
    return seconds


def _read(file: Path) -> dict[str, float] | None:
    """What an earlier run measured; None when there is nothing, or nothing of use."""
    try:
        found = json.loads(read_private(file) or b"")["seconds"]
        seconds = {str(name): float(took) for name, took in found.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None
    return seconds if seconds and all(took > 0 and math.isfinite(took) for took in seconds.values()) else None
