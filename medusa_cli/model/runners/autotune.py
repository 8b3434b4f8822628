"""Which runner `auto` takes: the quickest here, by measuring. Remembered for these weights, this machine, its threads.

Layouts of the linear layers are held against each other over some layers of every shape, before the model is laid out;
whole forwards (compiled, recorded) against the same target without them.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from medusa_cli.contracts import Draft
from medusa_cli.kernels.blocks import find_blocks
from medusa_cli.kernels.layout import packed_linear
from medusa_cli.kernels.packed import PackedLinear
from medusa_cli.model.clock import now
from medusa_cli.model.costs.kept import MOST_AGE, setting_of
from medusa_cli.model.forwards import Forward
from medusa_cli.model.target import Target
from medusa_cli.model.weights import num_weights
from medusa_cli.trees.tree import TokenTree
from medusa_cli.util import remembered
from medusa_cli.util.busy import Meter
from medusa_cli.util.timing import Times, interleaved, was_disturbed, widest_spread

Way = TypeVar("Way", bound=Hashable)

KIND = "runners"
LEAST_NUMBERS = 2**22  # a clock can't tell the layouts of a smaller model apart: it gets the first
AHEAD = 1.1  # what comes later in the order is taken when it is this much quicker: less may be noise
AHEAD_IF_DISTURBED = 2.0  # the same of what was measured while others had the processor
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


def is_quicker(target: Target, name: str, forward: Forward) -> bool:
    """Whether steps with a forward of another kind are no slower than those without. Afterwards it is asked first."""
    if num_weights(target) < LEAST_NUMBERS:
        return True
    how = f"{target.identity.runner} {target.dtype_name} {target.identity.attention}"
    key = _key(name, target.fingerprint, how, target.device)
    return chosen(_remembered(key, lambda: forward_seconds(target, name, forward))) == name


def chosen(compared: "Compared") -> str:
    """The first, unless another is clearly quicker; among neighbours, clearly means more."""
    seconds, ahead = compared.seconds, AHEAD_IF_DISTURBED if compared.disturbed else AHEAD
    first, best = next(iter(seconds)), min(seconds, key=lambda name: seconds[name])
    return best if seconds[first] > ahead * seconds[best] else first


@dataclass(frozen=True)
class Compared:
    """Seconds that each way takes over 1 node and over 8 together, the favourite first.

    disturbed   others had the processor meanwhile, or rounds differ more than they do on a quiet machine
    """

    seconds: dict[str, float]
    disturbed: bool


@torch.inference_mode()
def layout_seconds(layers: Sequence[nn.Linear], *, blocks: bool) -> Compared:
    """What all these layers take in a plain step and in one over 8 nodes, by layout; rounds are interleaved.

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
    meter, seconds, spread = Meter(), dict.fromkeys(layouts, 0.0), 0.0
    for sample in samples:
        times = _timed(sample.passes(layouts), layers[0].weight.device)
        spread = max(spread, widest_spread(times))
        for (name, _), each in times.items():
            seconds[name] += sample.share * each.least
    return Compared(seconds, was_disturbed(spread, meter))


@dataclass(frozen=True)
class _Pass:
    """All layers of a sample in one layout, one after the other."""

    layers: Sequence[nn.Module]
    inputs: Tensor

    def __call__(self) -> None:
        for layer in self.layers:
            layer(self.inputs)


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

    @property
    def share(self) -> float:
        """Layers of this shape, for each one here."""
        return self.out_of / len(self.layers)

    def lies_on_a_grid(self) -> bool:
        """Whether the weights of any can be stored as blocks."""
        return any(find_blocks(layer.weight) is not None for layer in self.layers)

    def passes(self, layouts: Mapping[str, Callable[[nn.Linear], nn.Module]]) -> dict[tuple[str, int], _Pass]:
        """All layers here in each layout, over each number of rows."""
        laid_out = {name: [lay(layer) for layer in self.layers] for name, lay in layouts.items()}
        width = self.layers[0].in_features
        # none are drawn: what others draw later must not depend on whether this was remembered
        return {(name, rows): _Pass(held, torch.ones(rows, width)) for name, held in laid_out.items() for rows in ROWS}


@dataclass(frozen=True)
class _Step:
    """A step with a forward of another kind, or without."""

    forwards: Sequence[Forward]
    target: Target
    draft: Draft
    cache: Any

    def __call__(self) -> None:
        self.target.use(*self.forwards)
        self.target.verify(self.draft, self.cache)


@torch.inference_mode()
def forward_seconds(target: Target, name: str, forward: Forward) -> Compared:
    """What steps take with a forward of another kind, and without; rounds are interleaved. Afterwards it is in."""
    work = {}
    for way, forwards in ((name, [forward]), (f"without {name}", [])):
        target.use(*forwards)
        cache = target.new_cache(1, 0)
        target.prefill([[0]], cache)
        for rows in ROWS:
            work[way, rows] = _Step(forwards, target, _draft(target, rows), cache)
    meter = Meter()
    times = _timed(work, target.device)
    target.use(forward)
    seconds = {way: sum(times[way, rows].least for rows in ROWS) for way in (name, f"without {name}")}
    return Compared(seconds, was_disturbed(widest_spread(times), meter))


@torch.inference_mode()
def try_steps(target: Target) -> None:
    """A plain step and one over 8 nodes: raises what the target's forward raises."""
    cache = target.new_cache(1, 0)
    target.prefill([[0]], cache)
    for rows in ROWS:
        target.verify(_draft(target, rows), cache)


def _draft(target: Target, rows: int) -> Draft:
    return Draft(torch.zeros(1, rows, dtype=torch.long, device=target.device), TokenTree.chain(rows - 1))


def _timed(work: Mapping[Way, Callable[[], None]], device: torch.device) -> dict[Way, Times]:
    return interleaved(work, lambda: now(device), rounds=ROUNDS)


def _key(what: str, fingerprint: str, how: str, device: torch.device) -> dict[str, str]:
    """All that the outcome depends on."""
    return {"what": what, "fingerprint": fingerprint, "how": how, **setting_of(device)}


def _remembered(key: remembered.Key, measure: Callable[[], Compared]) -> Compared:
    """What an earlier run found, else what is measured now and kept."""
    fact = remembered.recall(KIND, key, _read)
    if fact is not None and fact.age < MOST_AGE:
        _say(logging.DEBUG, fact.value)  # it was said once; now to whoever asks for more
        return Compared(fact.value, fact.disturbed)
    compared = measure()
    if compared.disturbed:
        logger.warning(
            "which runner is quickest was measured, and will be again: the machine was busy or changed its speed"
        )
    remembered.remember(KIND, key, {"seconds": compared.seconds}, disturbed=compared.disturbed)
    _say(logging.INFO, compared.seconds)
    return compared


def _say(level: int, seconds: Mapping[str, float]) -> None:
    times = ", ".join(f"{name} {1000 * took:.1f} ms" for name, took in seconds.items())
    logger.log(level, "measured for runner auto, steps over 1 and over 8 nodes together: %s", times)


def _read(value: Any) -> dict[str, float]:
    """Seconds by name. Raises ValueError and its like for something else."""
    seconds = {str(name): float(took) for name, took in value["seconds"].items()}
    if not seconds or not all(took > 0 and math.isfinite(took) for took in seconds.values()):
        raise ValueError("no times")
    return seconds
